"""Formats errors for Anthropic's clients."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from penstock.server.anthropic.protocol import AnthropicError
from penstock.server.http import errors
from penstock.server.http.access import route_path
from penstock.server.http.asgi import HttpMiddleware
from penstock.server.http.errors import body_of, encode_error, status_of
from penstock.server.http.replies import StreamFrame

PREFIX = "/v1/messages"
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


describe_errors = partial(errors.describe_errors, model=AnthropicError, types=TYPES)


def error_body(status: int, message: str, request_id: str | None) -> dict[str, Any]:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": request_id,
    }


class AnthropicFrame(StreamFrame):
    """Writes events with their type as the event name."""

    def event(self, chunk: str) -> str:
        return f"event: {json.loads(chunk)['type']}\ndata: {chunk}\n\n"

    def error(self, error: Exception) -> str:
        told = body_of(error, self._request_id)["error"]
        body = error_body(status_of(error), told["message"], self._request_id)
        return f"event: error\ndata: {encode_error(body).decode()}\n\n"

    def end(self) -> str:
        return ""

    def keep_alive(self) -> str:
        return self.event('{"type": "ping"}')


class AnthropicErrors(HttpMiddleware):
    """Converts every error of Anthropic's endpoints to Anthropic's format."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope)
        if path != PREFIX and not path.startswith(f"{PREFIX}/"):
            await self.app(scope, receive, send)
            return
        held: Message | None = None  # the start of an error's response
        body = b""

        async def send_reshaped(message: Message) -> None:
            nonlocal held, body
            if message["type"] == "http.response.start" and message["status"] >= 400:
                held = message
            elif held is None or message["type"] != "http.response.body":
                await send(message)
            else:
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    start, content = _reshape(held, body)
                    await send(start)
                    await send({"type": "http.response.body", "body": content})

        await self.app(scope, receive, send_reshaped)


def _reshape(start: Message, body: bytes) -> tuple[Message, bytes]:
    headers = MutableHeaders(raw=list(start["headers"]))
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, TypeError, KeyError):
        return start, body  # not written by our handlers
    content = encode_error(error_body(start["status"], message, headers.get("x-request-id")))
    headers["content-length"] = str(len(content))
    return {**start, "headers": headers.raw}, content
