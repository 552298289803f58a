"""How bodies are read: small ones at once, large ones where they hold up nobody."""

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

# No request of good faith comes near this; millions of objects take Python's parser, and then its
# garbage collector, seconds in which no other thread runs.
MAX_JSON_PARTS = 512 * 1024
MAX_JSON_VALUES = 2 * 1024 * 1024  # of any kind, at some 40 bytes each
PIECE_LENGTH = 1024 * 1024


class JsonRoute(APIRoute):
    """Parses and checks the `body` of a large request in a thread for these."""

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
                if reader.refusal is not None:  # which the framework takes for broken JSON
                    raise reader.refusal from None
                raise

        return handle_json


class JsonRequest(Request):
    """A request whose body, if it is large, is read to the end before the framework sees it.

    The framework would keep such a body for as long as the request lasts: it is given the finished
    object, and something that stands for the bytes.
    """

    def __init__(self, scope: Scope, receive: Receive, kind: type[BaseModel]) -> None:
        super().__init__(scope, receive)
        self._kind = kind
        self._content: bytearray | None = None
        self.refusal: Exception | None = None

    async def body(self) -> bytes:
        """All of it, or for large JSON something in its place: `json` has the rest."""
        if self._content is None:
            self._content = bytearray()
            async for chunk in self.stream():
                self._content += chunk
        return b"{}" if is_large_request() and self._is_json() else bytes(self._content)

    def _is_json(self) -> bool:
        """Whether the framework will ask for JSON."""
        kind, _, _ = self.headers.get("content-type", "").lower().partition(";")
        main, _, sub = kind.strip().partition("/")
        return main == "application" and (sub == "json" or sub.endswith("+json"))

    async def json(self) -> Any:
        """What the framework makes the body of: a finished one is left as it is."""
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
    """The request that `body` holds, which is emptied.

    Raises `InputError` if it has too many parts or values, what `json.loads` raises if it is not
    JSON, and the framework's own error if it is no such request.
    """
    text = body.decode(json.detect_encoding(body), "surrogatepass")  # as json.loads does
    body.clear()
    if num_parts(text) > MAX_JSON_PARTS:
        raise InputError(
            f"the body may hold at most {MAX_JSON_PARTS} objects, lists and fields together: "
            "send less at a time"
        )
    if num_values(text) > MAX_JSON_VALUES:
        raise InputError(
            f"the body may hold at most {MAX_JSON_VALUES} values, such as token ids: send less at "
            "a time"
        )
    # The parser lets other threads run when it calls Python.
    value = json.loads(text, object_hook=lambda made: made, parse_int=lambda digits: int(digits))
    try:
        return kind.model_validate(value, from_attributes=True)  # as the framework does
    except ValidationError as error:
        errors = error.errors(include_url=False)
    raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in errors])


def num_parts(body: str) -> int:
    """How many objects, lists and fields of objects JSON has; what its texts hold does not count.

    Ends soon after `MAX_JSON_PARTS`.
    """
    return _count(body, "{[:", MAX_JSON_PARTS)


def num_values(body: str) -> int:
    """About how many values JSON has, numbers among them; ends soon after `MAX_JSON_VALUES`."""
    return _count(body, ",", MAX_JSON_VALUES)


def _count(body: str, characters: str, limit: int) -> int:
    """How many of these stand outside of texts; more than `limit` are not counted to the end."""

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
