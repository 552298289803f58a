"""The ASGI app: decides which routers it has and which middleware every request passes."""

from __future__ import annotations

from fastapi import FastAPI

import penstock
from penstock.server import playground
from penstock.server.adapters import routes as adapters
from penstock.server.adapters.holds import AdapterHolds
from penstock.server.anthropic import messages
from penstock.server.anthropic.errors import AnthropicErrors
from penstock.server.http import errors
from penstock.server.http.access import (
    ADMIN_REFUSAL,
    REFUSAL,
    KeyGuard,
    KeyRing,
    TenantLabel,
    is_admin_path,
    is_private_path,
)
from penstock.server.http.exchange import ExchangeObserver
from penstock.server.http.middleware import (
    BodyLimit,
    Cors,
    HeadAsGet,
    RequestContext,
    TrailingSlash,
)
from penstock.server.http.plugged import add_middleware
from penstock.server.openai import (
    chat,
    chat_batch,
    completions,
    invocations,
    models,
    tokenize,
)
from penstock.server.operations import admin, metrics, replicas
from penstock.server.operations.access_log import log_exchange
from penstock.server.operations.request_log import RequestLog
from penstock.server.pooling import cohere, embeddings, scores
from penstock.server.responses import conversations
from penstock.server.responses import routes as responses
from penstock.server.responses.runner import ResponseRunner
from penstock.server.service import Service
from penstock.server.shared import Shared

ROUTERS = (
    chat.router,
    chat_batch.router,
    completions.router,
    invocations.router,
    messages.router,
    models.router,
    embeddings.router,
    scores.router,
    cohere.router,
    responses.router,
    conversations.router,
    tokenize.router,
    admin.router,
    replicas.router,
    adapters.router,
    metrics.router,
    playground.router,
)


def build_app(service: Service, shared: Shared) -> FastAPI:
    """Build the ASGI app that serves `service`'s model."""
    config = service.server_config
    app = FastAPI(
        title="Penstock",
        description="An inference engine for large language models, behind the APIs of OpenAI and "
        "Anthropic.",
        version=penstock.__version__,
        root_path=config.root_path,
        redirect_slashes=False,
        docs_url=None,  # our own page loads nothing from other hosts
        redoc_url=None,
        openapi_url=None if config.disable_fastapi_docs else "/openapi.json",
    )
    app.state.service = service
    app.state.metrics = shared.metrics
    service.on_tool_turn = shared.on_tool_turn
    if service.frontend.media is not None:
        service.frontend.media.on_lookup = shared.on_media_lookup
    app.state.responses = ResponseRunner(service, shared.store, shared.stop_elsewhere)
    for router in ROUTERS:
        app.include_router(router)
    if config.enable_tokenizer_info_endpoint:
        app.include_router(tokenize.info_router)
    errors.install(app)
    # The last middleware added is the first to handle a request.
    app.add_middleware(HeadAsGet)
    for spec in config.middleware:
        add_middleware(app, spec)
    if service.adapters is not None:
        app.add_middleware(AdapterHolds)
    app.add_middleware(BodyLimit, max_bytes=config.max_request_body_bytes)
    admins, ring = KeyRing(config.admin_keys), KeyRing(config.client_keys + config.admin_keys)
    if config.admin_api_key:
        app.add_middleware(KeyGuard, keys=admins, needs_key=is_admin_path, refusal=ADMIN_REFUSAL)
    if config.api_key:
        app.add_middleware(KeyGuard, keys=ring, needs_key=is_private_path, refusal=REFUSAL)
    if config.api_key or config.admin_api_key:
        app.add_middleware(TenantLabel, keys=ring)
    if config.enable_log_requests:
        service.client.observers.append(RequestLog(ring.name_of))
    app.add_middleware(
        Cors,
        allow_origins=config.cors_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=["X-Request-Id"],
    )
    observers: list[ExchangeObserver] = [shared.on_exchange]
    if config.access_log:
        observers.append(log_exchange)
    if service.tracing is not None:
        from penstock.server.operations.tracing import RequestSpans, TraceContext

        service.client.observers.append(RequestSpans(service.tracing, service.model_names[0]))
        app.add_middleware(TraceContext, tracing=service.tracing)
    app.add_middleware(RequestContext, observers=observers)
    app.add_middleware(AnthropicErrors)
    app.add_middleware(TrailingSlash)
    return app
