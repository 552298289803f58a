"""Decides how request bodies are parsed: small ones directly, large ones in a thread."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, get_type_hints

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from penstock.protocol.errors import InputError
from penstock.server.http.replies import ClientGone, unless_gone
from penstock.server.service import Service, is_large_request

# No legitimate request comes near this. Millions of objects block the parser and the garbage
# collector for seconds, in which no other thread runs.
MAX_JSON_PARTS = 512 * 1024
MAX_JSON_VALUES = 2 * 1024 * 1024  # of any kind, about 40 bytes each
PIECE_LENGTH = 1024 * 1024


class JsonRoute(APIRoute):
    """A route that parses and validates the `body` of a large request in a thread."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        kind: type[BaseModel] | None = get_type_hints(self.endpoint).get("body")
        if kind is None:
            return handle

        async def handle_json(request: Request) -> Response:
            reader = JsonRequest(request.scope, request.receive, kind)
            try:
                return await handle(reader)
            except Exception:
                if reader.refusal is not None:  # the framework would report invalid JSON
                    raise reader.refusal from None
                raise

        return handle_json


class JsonRequest(Request):
    """A request whose large body is parsed before the framework sees it.

    The framework would keep the bytes for as long as the request lasts. It gets the validated
    object and a placeholder for the bytes.
    """

    def __init__(self, scope: Scope, receive: Receive, kind: type[BaseModel]) -> None:
        super().__init__(scope, receive)
        self._kind = kind
        self._content: bytearray | None = None
        self.refusal: Exception | None = None

    async def body(self) -> bytes:
        """The body, or a placeholder if it is large JSON. `json` then parses the real one."""
        if self._content is None:
            self._content = bytearray()
            async for chunk in self.stream():
                self._content += chunk
        return b"{}" if is_large_request() and self._is_json() else bytes(self._content)

    def _is_json(self) -> bool:
        """Whether the framework will call `json`."""
        kind, _, _ = self.headers.get("content-type", "").lower().partition(";")
        main, _, sub = kind.strip().partition("/")
        return main == "application" and (sub == "json" or sub.endswith("+json"))

    async def json(self) -> Any:
        """The value that the framework validates. A validated object passes unchanged."""
        body = await self.body()
        if not is_large_request():
            return json.loads(body)
        assert self._content is not None
        service: Service = self.app.state.service
        try:
            return await unless_gone(self, service.in_thread(read_body, self._kind, self._content))
        except (InputError, RequestValidationError, ClientGone) as error:
            self.refusal = error.with_traceback(None)
            raise


def read_body(kind: type[BaseModel], body: bytearray) -> BaseModel:
    """Parse and validate `body`. Empties it.

    Raises `InputError` if it has too many parts or values, the error of `json.loads` if it is not
    JSON, and the framework's validation error if it is not a valid `kind`.
    """
    text = body.decode(json.detect_encoding(body), "surrogatepass")  # as json.loads does
    body.clear()
    if num_parts(text) > MAX_JSON_PARTS:
        raise InputError(
            f"the body may contain at most {MAX_JSON_PARTS} objects, lists and fields together: "
            "send less at a time"
        )
    if num_values(text) > MAX_JSON_VALUES:
        raise InputError(
            f"the body may contain at most {MAX_JSON_VALUES} values, such as token ids: send less "
            "at "
            "a time"
        )
    # The callbacks into Python let other threads run.
    value = json.loads(text, object_hook=lambda made: made, parse_int=lambda digits: int(digits))
    try:
        return kind.model_validate(value, from_attributes=True)  # as the framework does
    except ValidationError as error:
        errors = error.errors(include_url=False)
    raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in errors])


def num_parts(body: str) -> int:
    """Count the objects, lists and object fields in JSON. Text inside strings does not count.

    Stops soon after `MAX_JSON_PARTS`.
    """
    return _count(body, "{[:", MAX_JSON_PARTS)


def num_values(body: str) -> int:
    """Estimate the number of values in JSON. Stops soon after `MAX_JSON_VALUES`."""
    return _count(body, ",", MAX_JSON_VALUES)


def _count(body: str, characters: str, limit: int) -> int:
    """Count these characters outside strings. Stops soon after `limit`."""

    def count(text: str) -> int:
        return sum(map(text.count, characters))

    num_at_most = count(body)
    if num_at_most <= limit:
        return num_at_most
    bare = body.replace(r"\\", "").replace(r"\"", "")
    num, in_text = 0, False
    for start in range(0, len(bare), PIECE_LENGTH):
        if num > limit:
            break
        pieces = bare[start : start + PIECE_LENGTH].split('"')
        num += sum(map(count, pieces[in_text::2]))
        in_text ^= len(pieces) % 2 == 0
    return num
