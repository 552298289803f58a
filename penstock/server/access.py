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
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_admin_path = scope["type"] == "http" and get_route_path(scope) in ADMIN_PATHS
        if is_admin_path and not _matching(scope, self._digests):
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
    """Notes whose request it is: all that come with the same one of `keys` are one tenant's.

    Other keys that a client sends beside it count for nothing: it could make up any number.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            known = _matching(scope, self._digests)
            current_tenant.set(known[0].hex()[:16] if known else "")
        await self.app(scope, receive, send)


def sent_keys(scope: Scope) -> list[str]:
    """The keys that a client sends, in the ways that clients have."""
    headers = Headers(scope=scope)
    scheme, _, key = headers.get("authorization", "").partition(" ")
    sent = [key] if scheme.lower() == "bearer" else []
    sent += headers.getlist("x-api-key")[:1]
    return [key.strip() for key in sent]


def _matching(scope: Scope, digests: Sequence[bytes]) -> list[bytes]:
    """Those of `digests` whose keys a client sends; each is compared, in constant time."""
    sent = [_digest(key.encode("latin-1")) for key in sent_keys(scope)]  # the bytes that came
    return [ours for key in sent for ours in digests if hmac.compare_digest(key, ours)]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
