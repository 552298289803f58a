"""Who may do what, behind the guard that asks for a key: operators' routes, and whose share is it.

Keys are compared and told apart by digest; no key is kept, logged or passed on.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from contextvars import ContextVar

from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.server.errors import error_response

ADMIN_PATHS = frozenset({"/reset_prefix_cache"})

current_tenant: ContextVar[str] = ContextVar("current_tenant", default="")
"""Whose request is being handled, where that matters (--scheduling-policy fair)."""


class AdminGuard:
    """Lets only who brings an operator's key to the routes that change the server for everyone."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and get_route_path(scope) in ADMIN_PATHS:
            sent = [_digest(key) for key in sent_keys(scope)]
            matches = [hmac.compare_digest(key, ours) for key in sent for ours in self._digests]
            if not any(matches):
                response = error_response(
                    401,
                    "this route is the operators': send one of the server's admin API keys as "
                    "'Authorization: Bearer KEY'",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)


class TenantLabel:
    """Notes whose request it is: all that come with the same key are one tenant's."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            keys = sent_keys(scope)
            current_tenant.set(_digest(keys[0]).hex()[:16] if keys else "")
        await self.app(scope, receive, send)


def sent_keys(scope: Scope) -> list[str]:
    """The keys that a client sends, in the ways that clients have."""
    headers = Headers(scope=scope)
    scheme, _, key = headers.get("authorization", "").partition(" ")
    sent = [key] if scheme.lower() == "bearer" else []
    sent += headers.getlist("x-api-key")[:1]
    return [key.strip() for key in sent]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
