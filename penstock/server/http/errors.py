"""Decides which status and body an exception becomes. All errors have one format."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from penstock.config.vllm_routes import why_nothing
from penstock.confined.errors import PoolClosed, PoolFull, WorkerLost
from penstock.protocol.errors import (
    ContextOverflow,
    CrashFault,
    EngineDeadError,
    InputError,
    PenstockError,
)

logger = logging.getLogger(__name__)

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "PayloadTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
CONTEXT_OVERFLOW = "context_length_exceeded"  # OpenAI's code, which clients check
RETRY_AFTER_S = 1
MAX_COMPLAINTS = 5  # about one field


class ErrorDetail(BaseModel):
    message: str = Field(description="What is wrong, and how to fix it.")
    type: str = Field(description="Type of error, such as BadRequestError.")
    param: str | None = Field(description="Request field that caused the error.")
    code: int | str = Field(
        description="HTTP status, or context_length_exceeded if the prompt is too long."
    )


class ErrorResponse(BaseModel):
    error: ErrorDetail


class Overloaded(PenstockError):
    """The queue is full. A later attempt may succeed."""


class NotFound(PenstockError):
    """The name that the client gave in `field` does not exist."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class RequestTimeout(PenstockError):
    """The request exceeded its timeout."""


STATUS_OF: tuple[tuple[type[PenstockError], int], ...] = (
    (InputError, 400),
    (NotFound, 404),
    (RequestTimeout, 408),
    (Overloaded, 429),
    (PoolFull, 429),
    (WorkerLost, 429),
    (CrashFault, 500),
    (EngineDeadError, 503),
    (PoolClosed, 503),
)


def describe_errors(
    *statuses: int, model: type[BaseModel] = ErrorResponse, types: Mapping[int, str] = TYPES
) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route with these errors, for the OpenAPI document."""
    described: dict[int | str, dict[str, Any]] = {
        status: {"model": model, "description": types[status]} for status in statuses
    }
    described["default"] = {"model": model, "description": "Other errors."}
    return described


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or status}}


def encode_error(body: Mapping[str, Any]) -> bytes:
    """Encode as ASCII: a message may quote client input that is not valid Unicode."""
    return json.dumps(body, ensure_ascii=True).encode()


def error_response(
    status: int,
    message: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    content = encode_error(error_body(status, message, param))
    return Response(content, status, headers, media_type="application/json")


def status_of(error: Exception) -> int:
    return next((status for kind, status in STATUS_OF if isinstance(error, kind)), 500)


def body_of(error: Exception, request_id: str) -> dict[str, Any]:
    """Return the error body for the client. Logs errors whose details the client must not see."""
    if isinstance(error, tuple(kind for kind, _ in STATUS_OF)):
        code = CONTEXT_OVERFLOW if isinstance(error, ContextOverflow) else None
        param = error.field if isinstance(error, (InputError, NotFound)) else None
        return error_body(status_of(error), str(error), param, code)
    logger.error("Request %s failed", request_id, exc_info=error)
    return error_body(
        500, f"the server failed to answer; its log says why under request id {request_id}"
    )


def response_of(error: Exception, request_id: str) -> Response:
    body, status = body_of(error, request_id), status_of(error)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else None
    return Response(encode_error(body), status, headers, media_type="application/json")


def install(app: FastAPI) -> None:
    """Give the framework's errors the same format."""

    def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        messages = {
            400: "the body cannot be read: it must be JSON in UTF-8, nested less than 1000 deep, "
            "without integers of thousands of digits",
            404: why_nothing(request.url.path.removeprefix(request.scope.get("root_path", ""))),
            405: f"{request.method} is not allowed at {request.url.path}",
        }
        message = messages.get(error.status_code, str(error.detail))
        return error_response(error.status_code, message, headers=error.headers)

    def on_validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        message, param = explain(error.errors())
        return error_response(400, message, param)

    def on_penstock_error(request: Request, error: Exception) -> Response:
        return response_of(error, request.scope["state"]["request_id"])

    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(PenstockError, on_penstock_error)


def explain(errors: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """Return the first error of a body as a message, and the path of its field.

    A value that matches no member of a union is reported once per member. The messages about one
    field and its contents are joined.
    """
    first = errors[0]
    if first["type"] == "json_invalid":
        return f"the body is not valid JSON: {first['ctx']['error']}", None
    path = _field_path(first["loc"])
    if path is None:
        return f"the body must be a JSON object sent as application/json: {first['msg']}", None
    texts: dict[str, None] = {}
    for error in errors:
        inner = _field_path(error["loc"]) or ""
        if inner == path:
            texts[str(error["msg"])] = None
        elif inner.startswith((f"{path}.", f"{path}[")):
            texts[f"{inner}: {error['msg']}"] = None
    return f"{path}: {', or '.join(list(texts)[:MAX_COMPLAINTS])}", path


def _field_path(location: Sequence[int | str]) -> str | None:
    """Convert ``("body", "messages", 0, "content", "str")`` to ``messages[0].content``."""
    path = ""
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in _UNION_MEMBERS:
            path += f".{part}" if path else part
    return path or None


# The validator's names for members of a union. They are not part of a path.
_UNION_MEMBERS = {"str", "int", "float", "bool"}
