"""POST /v1/embeddings, /pooling and /classify: one vector per input."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from penstock.protocol.delta import EngineDelta
from penstock.protocol.pooling import PoolingParams, PoolingTask
from penstock.protocol.request import EngineRequest
from penstock.server.http.bodies import JsonRoute
from penstock.server.http.errors import describe_errors
from penstock.server.http.replies import json_response, unless_gone
from penstock.server.pooling.inputs import input_prepare, read_inputs, render_messages
from penstock.server.pooling.protocol import (
    ClassificationList,
    ClassifyRequest,
    EmbeddingList,
    EmbeddingRequest,
    InputBody,
    PoolingList,
    PoolingRequest,
)
from penstock.server.pooling.run import pool_all
from penstock.server.pooling.vectors import usage_of, vector_of, write_named, write_vector
from penstock.server.service import Service
from penstock.text.pooling import PoolingPrompt, pooling_info

router = APIRouter(tags=["Pooling"], route_class=JsonRoute)
ERRORS = describe_errors(400, 401, 404, 408, 413, 429, 500, 503)

WriteItem = Callable[[int, EngineDelta], dict[str, Any]]


@router.post("/v1/embeddings", response_model=EmbeddingList, responses=ERRORS)
async def create_embedding(body: EmbeddingRequest, request: Request) -> Response:
    """Embed texts, token ids or a conversation."""

    def write(index: int, delta: EngineDelta) -> dict[str, Any]:
        vector = write_vector(delta, body.encoding_format, body.embed_dtype)
        further = write_named(delta, body.vectors or (), body.encoding_format, body.embed_dtype)
        further.pop("dense", None)
        return {"object": "embedding", "index": index, "embedding": vector, **further}

    return await _answer(request, body, "embd", "embed", write, body.dimensions)


@router.post("/pooling", response_model=PoolingList, responses=ERRORS)
async def create_pooling(body: PoolingRequest, request: Request) -> Response:
    """Run the model's pooling task: one vector per input, or one per token."""

    def write(index: int, delta: EngineDelta) -> dict[str, Any]:
        data: object
        if body.vectors:
            data = write_named(delta, body.vectors, body.encoding_format, body.embed_dtype)
        else:
            data = write_vector(delta, body.encoding_format, body.embed_dtype)
        return {"object": "pooling", "index": index, "data": data}

    return await _answer(request, body, "pool", body.task, write, body.dimensions)


@router.post("/classify", response_model=ClassificationList, responses=ERRORS)
async def create_classification(body: ClassifyRequest, request: Request) -> Response:
    """Classify texts, token ids or a conversation."""
    service: Service = request.app.state.service
    info = service.frontend.pooling
    labels = info.labels if info is not None else []

    def write(index: int, delta: EngineDelta) -> dict[str, Any]:
        probs = vector_of(delta)
        label = labels[int(probs.argmax())] if labels else None
        return {
            "index": index,
            "label": label,
            "probs": probs.tolist(),
            "num_classes": len(probs),
        }

    return await _answer(request, body, "classify", "classify", write)


async def _answer(
    request: Request,
    body: InputBody,
    kind: str,
    task: PoolingTask | None,
    write: WriteItem,
    dimensions: int | None = None,
) -> Response:
    service: Service = request.app.state.service
    model = await service.check_model(body.model)
    service.check_pools()
    service.check_capacity()
    use_activation: bool | None = getattr(body, "use_activation", None)
    params = PoolingParams(
        task=task,
        dimensions=dimensions,
        use_activation=use_activation,
        prompt_name=getattr(body, "prompt_name", None),
        vectors=getattr(body, "vectors", None),
    )
    field = "task" if isinstance(body, PoolingRequest) else "model"
    pooling_info(service.frontend).check(params, field)  # fail before tokenizing many texts
    request_id = f"{kind}-{body.request_id or request.state.request_id}"
    inputs = read_inputs(body)

    async def work() -> bytes:
        prompts: Sequence[PoolingPrompt] = inputs
        if body.messages is not None:
            prompts = [await service.in_thread(render_messages, service, body)]
        prepare = input_prepare(service, body, params, request_id)
        requests, deltas = await pool_all(service, prepare, prompts, params, body.timeout)
        # In a thread: formatting millions of numbers would block the event loop.
        return await service.in_thread(_write, request_id, model, requests, deltas, write)

    return json_response(await unless_gone(request, work()))


def _write(
    request_id: str,
    model: str,
    requests: Sequence[EngineRequest],
    deltas: Sequence[EngineDelta],
    write: WriteItem,
) -> bytes:
    return msgspec.json.encode(
        {
            "id": request_id,
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [write(index, delta) for index, delta in enumerate(deltas)],
            "usage": usage_of(requests).model_dump(exclude_unset=True),
        }
    )
