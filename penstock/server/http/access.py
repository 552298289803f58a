"""Whose request it is: the server's keys, operators' routes, and who shares with whom.

Keys are compared and told apart by a keyed digest, whose secret is drawn at the server's start: no
key is kept, logged or passed on, nor anything that a guessed key could be checked against.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Sequence
from contextvars import ContextVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.server.http.errors import error_response

ADMIN_PATHS = frozenset({"/reset_prefix_cache"})
ADMIN_REFUSAL = (
    "this route is the operators': send one of the server's admin API keys as 'Authorization: "
    "Bearer KEY'"
)
PUBLIC_PATHS = frozenset({"/", "/docs", "/docs/", "/health", "/ready", "/ping", "/favicon.ico"})
PUBLIC_PREFIX = "/static/"  # of the pages' files
REFUSAL = "send one of the server's API keys as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"

current_tenant: ContextVar[str] = ContextVar("current_tenant", default="")
"""Whose request is being handled: the digest of its key; empty where there are no keys."""

MAX_LABEL_LENGTH = 16  # of a tenant's name in the engine


def route_path(scope: Scope) -> str:
    """The path of a request below `root_path`, which a proxy may have left in front of it."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    below = path.removeprefix(root)
    return below if root and below[:1] in ("", "/") else path


def is_admin_path(path: str) -> bool:
    return path in ADMIN_PATHS


def is_private_path(path: str) -> bool:
    """All but the pages and the health checks."""
    return path not in PUBLIC_PATHS and not path.startswith(PUBLIC_PREFIX)


class KeyRing:
    """The server's keys."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._secret = secrets.token_bytes(32)
        self._digests = [self._digest(key.encode()) for key in keys]

    def owner(self, scope: Scope) -> str:
        """The digest of the one of these keys that a client sends; nothing if it sends none.

        Every key is compared, each in constant time: the time tells nothing about any. Others that
        are sent beside a right one count for nothing: a client could make up any number.
        """
        sent = [
            self._digest(key.encode("latin-1")) for key in _sent_keys(scope)
        ]  # the bytes that came
        known = [ours for key in sent for ours in self._digests if hmac.compare_digest(key, ours)]
        return known[0].hex() if known else ""

    def _digest(self, key: bytes) -> bytes:
        return hmac.digest(self._secret, key, "sha256")


class KeyGuard:
    """Lets in who brings one of `keys`, and anyone to paths that need none."""

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], needs_key: Callable[[str], bool], refusal: str
    ) -> None:
        self.app = app
        self._keys = KeyRing(keys)
        self._needs_key = needs_key
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if (
            scope["type"] == "http"
            and self._needs_key(route_path(scope))
            and not self._keys.owner(scope)
        ):
            app = error_response(401, self._refusal, headers={"WWW-Authenticate": "Bearer"})
        await app(scope, receive, send)


class TenantLabel:
    """Notes whose request it is: all that come with the same one of `keys` are one tenant's."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._keys = KeyRing(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            current_tenant.set(self._keys.owner(scope))
        await self.app(scope, receive, send)


def _sent_keys(scope: Scope) -> list[str]:
    """The keys that a client sends, in the ways that clients have."""
    headers = Headers(scope=scope)
    scheme, _, key = headers.get("authorization", "").partition(" ")
    sent = [key] if scheme.lower() == "bearer" else []
    sent += headers.getlist("x-api-key")[:1]  # as Anthropic's clients have it
    return [key.strip() for key in sent]


def tenant_label() -> str:
    """The current tenant, as the engine knows it."""
    return current_tenant.get()[:MAX_LABEL_LENGTH]


def salt_by_tenant(cache_salt: str | None) -> str | None:
    """`cache_salt` as the current tenant's own: no other tenant's is equal to it.

    The digest has a fixed length, so salts of different parts differ as a whole.
    """
    tenant = current_tenant.get()
    if not tenant:
        return cache_salt
    return tenant if cache_salt is None else f"{tenant}:{cache_salt}"
