"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: adapters that come and go."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import Field
from starlette.responses import PlainTextResponse

from penstock.config.lora_modules import LoRAModule
from penstock.protocol.errors import InputError
from penstock.server.adapters.registry import ServedAdapters
from penstock.server.http.bodies import JsonRoute
from penstock.server.http.errors import describe_errors
from penstock.server.http.replies import unless_gone
from penstock.server.schema.base import Body, Text
from penstock.server.service import Service

# With PlainTextResponse as response_class, the schema would say that errors are plain text, too.
REPLIES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
    **describe_errors(400, 401, 404, 408, 413, 503),
}
router = APIRouter(tags=["Operations"], route_class=JsonRoute)


class LoadAdapterRequest(Body):
    lora_name: Text = Field(description="Name under which clients ask for the adapter.")
    lora_path: Text = Field(
        description="Folder, .gguf file, hub id or pypi:package==version, as the server's "
        "--allowed-lora-paths permits."
    )
    load_inplace: bool = Field(
        False, description="Replace an adapter of the same name. Requests that run keep theirs."
    )
    pinned: bool = Field(False, description="Keep the adapter in host memory.")
    base_model_name: Text | None = Field(
        None, description="Name of the base model, shown as the adapter's parent."
    )


class UnloadAdapterRequest(Body):
    lora_name: Text = Field(description="Name of the adapter.")
    lora_int_id: int | None = Field(None, description="Ignored: the name identifies it.")
    abort_requests: bool = Field(
        False,
        description="End the adapter's requests with an error. Otherwise they run to their end, "
        "and the answer comes after the last one.",
    )


@router.post(
    "/v1/load_lora_adapter",
    response_class=Response,
    responses=REPLIES,
)
async def load_adapter(body: LoadAdapterRequest, request: Request) -> Response:
    """Load a LoRA adapter. It is checked completely before the answer."""
    registry = _registry(request)
    module = LoRAModule(body.lora_name, body.lora_path, body.base_model_name)
    loading = registry.load(module, replace=body.load_inplace, pin=body.pinned)
    await unless_gone(request, loading)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post(
    "/v1/unload_lora_adapter",
    response_class=Response,
    responses=REPLIES,
)
async def unload_adapter(body: UnloadAdapterRequest, request: Request) -> Response:
    """Unload a LoRA adapter. New requests no longer find it, even before the answer."""
    unloading = _registry(request).unload(body.lora_name, end_requests=body.abort_requests)
    await unless_gone(request, unloading)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _registry(request: Request) -> ServedAdapters:
    service: Service = request.app.state.service
    if service.adapters is None:
        raise InputError("this server has no LoRA adapters: start it with --enable-lora")
    if not service.server_config.updates_adapters:
        raise InputError(
            "adapters cannot be loaded or unloaded here: that takes --admin-api-key or "
            "--allow-runtime-lora-updating"
        )
    return service.adapters
