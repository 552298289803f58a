"""/v1/responses: create, read, cancel and delete."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from penstock.protocol.errors import InputError
from penstock.server.http.access import current_tenant
from penstock.server.http.bodies import JsonRoute
from penstock.server.http.errors import body_of, describe_errors, encode_error, error_response
from penstock.server.http.replies import StreamFrame, event_stream, json_response, unless_gone
from penstock.server.openai.stream import ANSWERS
from penstock.server.responses.protocol import (
    DeletedReply,
    InputTokensReply,
    ItemList,
    ResponseReply,
    ResponseRequest,
)
from penstock.server.responses.run import error_code
from penstock.server.responses.runner import ResponseRunner
from penstock.server.responses.store import Page
from penstock.server.service import Service

router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)

COMMON_ERRORS = (400, 401, 404, 500, 503)


class ResponsesFrame(StreamFrame):
    """Writes events with their type as the event name. The last one tells how it ended."""

    def event(self, chunk: str) -> str:
        kind = chunk.removeprefix('{"type": "').partition('"')[0]  # the type is the first field
        return f"event: {kind}\ndata: {chunk}\n\n"

    def error(self, error: Exception) -> str:
        told = body_of(error, self._request_id)["error"]
        event = {
            "type": "error",
            "code": error_code(error),
            "message": told["message"],
            "param": told["param"],
        }
        return self.event(encode_error(event).decode())

    def end(self) -> str:
        return ""


@router.post("/v1/responses", response_model=ResponseReply, responses=ANSWERS)
async def create_response(body: ResponseRequest, request: Request) -> Response:
    """Create a response. Calls to tool servers are made on the way."""
    service, runner = _service_and_runner(request)
    model = await service.admit(body.model)
    request_id = request.state.request_id
    owner = current_tenant.get()
    history = await runner.history(owner, body)
    preparing = runner.prepare(owner, body, model, f"resp-{request_id}", history)
    owned = await unless_gone(request, preparing)
    if body.stream:
        return await event_stream(request, owned.events(), ResponsesFrame(request_id))
    if body.background:
        return json_response(await runner.start(owned))
    return json_response(await unless_gone(request, owned.whole()))


@router.post(
    "/v1/responses/input_tokens",
    response_model=InputTokensReply,
    responses=describe_errors(400, 401, 404, 413, 500, 503),
)
async def count_input_tokens(body: ResponseRequest, request: Request) -> Response:
    """Count the input tokens of a request to /v1/responses."""
    service, runner = _service_and_runner(request)
    await service.check_model(body.model)
    count = await unless_gone(request, runner.count(current_tenant.get(), body))
    return json_response(InputTokensReply(object="response.input_tokens", input_tokens=count))


@router.get(
    "/v1/responses/{response_id}",
    response_model=ResponseReply,
    responses=describe_errors(*COMMON_ERRORS),
)
async def retrieve_response(
    response_id: str, request: Request, stream: bool | None = None
) -> Response:
    """Retrieve a stored response."""
    if stream:
        raise InputError("a stored response is not streamed: leave stream out", "stream")
    _, runner = _service_and_runner(request)
    stored = await runner.response(current_tenant.get(), response_id)
    return json_response(stored.response)


@router.post(
    "/v1/responses/{response_id}/cancel",
    response_model=ResponseReply,
    responses=describe_errors(*COMMON_ERRORS),
)
async def cancel_response(response_id: str, request: Request) -> Response:
    """Cancel a response that runs in the background. One that has ended is returned unchanged."""
    _, runner = _service_and_runner(request)
    owner = current_tenant.get()
    await runner.stop(owner, response_id)
    stored = await runner.response(owner, response_id)
    if not stored.is_background:
        message = "only a response that was created with background can be cancelled"
        return error_response(400, message, "response_id")
    return json_response(stored.response)


@router.delete("/v1/responses/{response_id}", responses=describe_errors(*COMMON_ERRORS))
async def delete_response(response_id: str, request: Request) -> DeletedReply:
    """Delete a response. One that runs in the background is cancelled."""
    _, runner = _service_and_runner(request)
    owner = current_tenant.get()
    await runner.stop(owner, response_id)
    await runner.response(owner, response_id)
    await runner.store.delete(owner, response_id)
    return DeletedReply(id=response_id, object="response", deleted=True)


@router.get(
    "/v1/responses/{response_id}/input_items",
    response_model=ItemList,
    responses=describe_errors(*COMMON_ERRORS),
)
async def list_input_items(
    response_id: str,
    request: Request,
    page: Annotated[Page, Depends()],
) -> Response:
    """List the input items of a response, newest first by default."""
    _, runner = _service_and_runner(request)
    stored = await runner.response(current_tenant.get(), response_id)
    return json_response(stored.input.page(page))


def _service_and_runner(request: Request) -> tuple[Service, ResponseRunner]:
    return request.app.state.service, request.app.state.responses
