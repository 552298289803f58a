"""Middleware that every HTTP request passes: request id, error handling, CORS, size limit.

It is plain ASGI, so that handlers notice when a client disconnects.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.server.http.access import route_path
from penstock.server.http.asgi import HttpMiddleware
from penstock.server.http.errors import error_response, response_of
from penstock.server.http.exchange import ExchangeObserver, HttpExchange
from penstock.server.http.routing import read_route
from penstock.server.service import current_body_bytes

VALID_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
PAGES = frozenset({"", "/", "/docs"})


class RequestContext(HttpMiddleware):
    """Gives each request an id (the client's if it sent one) and turns exceptions into errors.

    Also sets `current_route`. `observers` are told of every request when its response has ended.
    """

    def __init__(self, app: ASGIApp, observers: Sequence[ExchangeObserver] = ()) -> None:
        super().__init__(app)
        self._observers = observers

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        read_route(headers)
        sent = headers.get("x-request-id", "")
        request_id = sent if VALID_REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        client = scope.get("client")
        exchange = HttpExchange(
            request_id, client[0] if client else "", scope["method"], scope["path"]
        )
        scope = {**scope}  # routing adds the route to it
        has_started, began = False, time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                exchange.status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            else:
                exchange.num_bytes_sent += len(message.get("body", b""))
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception as error:
            response = response_of(error, request_id)  # also logs it
            if not has_started:
                await response(scope, receive, send_with_id)
        finally:
            exchange.duration_s = time.monotonic() - began
            exchange.handler = getattr(scope.get("route"), "path", "none")
            exchange.num_bytes_received = scope["state"].get("num_body_bytes", 0)
            for observer in self._observers:
                observer(exchange)


class Cors(CORSMiddleware):
    """Starlette's CORS middleware, with refusals in the format of all errors."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_preflight = (
            scope["type"] == "http"
            and scope["method"] == "OPTIONS"
            and "access-control-request-method" in Headers(scope=scope)
        )
        if not is_preflight:
            await super().__call__(scope, receive, send)
            return
        sent: list[Message] = []

        async def keep(message: Message) -> None:
            sent.append(message)

        await super().__call__(scope, receive, keep)
        start, text = sent[0], b"".join(message.get("body", b"") for message in sent)
        if start["status"] != 400:
            for message in sent:
                await send(message)
            return
        headers = Headers(raw=start["headers"])
        why = (
            f"{text.decode()}: the server's --allowed-origins, --allowed-methods and "
            "--allowed-headers say which pages may do what"
        )
        kept = {name: value for name, value in headers.items() if not name.startswith("content-")}
        await error_response(400, why, headers=kept)(scope, receive, send)


class BodyLimit(HttpMiddleware):
    """Refuses a body that is too large as early as possible. Sets `current_body_bytes`."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        super().__init__(app)
        self._max_bytes = max_bytes

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"the body must have at most {self._max_bytes} bytes; send less at a time"
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            close = {"Connection": "close"}  # do not read the body
            await error_response(413, message, headers=close)(scope, receive, send)
            return
        num_bytes = 0

        async def receive_some() -> Message:
            nonlocal num_bytes
            part = await receive()
            num_bytes += len(part.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(413, message, headers={"Connection": "close"})
            current_body_bytes.set(num_bytes)
            scope["state"]["num_body_bytes"] = num_bytes
            return part

        await self.app(scope, receive_some, send)


class TrailingSlash(HttpMiddleware):
    """Removes a trailing slash from the path before routing.

    A redirect would lose the body with many clients. Web pages keep the slash, because their links
    are relative.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].endswith("/"):
            bare = {**scope, "path": scope["path"].rstrip("/")}
            if route_path(bare) not in PAGES:
                scope = bare
        await self.app(scope, receive, send)


class HeadAsGet(HttpMiddleware):
    """Handles HEAD as GET. The server, which has a scope of its own, omits the body."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":
            scope["method"] = "GET"
        await self.app(scope, receive, send)
