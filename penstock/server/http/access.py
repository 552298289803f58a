"""Decides who may use a route, and to which tenant a request belongs.

Keys are compared by a keyed digest with a random secret per server start. No key is stored, logged
or passed on, and neither is anything against which a guessed key could be checked.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Sequence
from contextvars import ContextVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.config.api_keys import ApiKey
from penstock.server.http.asgi import HttpMiddleware
from penstock.server.http.errors import error_response

ADMIN_PATHS = frozenset(
    {
        "/reset_prefix_cache", "/start_profile", "/stop_profile", "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }
)  # fmt: skip
ADMIN_PREFIX = "/replicas"
ADMIN_REFUSAL = (
    "this route requires an admin API key of the server: send it as 'Authorization: Bearer KEY'"
)
PUBLIC_PATHS = frozenset({"/", "/docs", "/docs/", "/health", "/ready", "/ping", "/favicon.ico"})
PUBLIC_PREFIX = "/static/"  # files of the web pages
REFUSAL = "send one of the server's API keys as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"

current_tenant: ContextVar[str] = ContextVar("current_tenant", default="")
"""The tenant of the current request: the digest of its key, or empty without keys."""

MAX_LABEL_LENGTH = 16  # of a tenant's label in the engine


def route_path(scope: Scope) -> str:
    """The path of a request without `root_path`, which a proxy may not have removed."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    below = path.removeprefix(root)
    return below if root and below[:1] in ("", "/") else path


def is_admin_path(path: str) -> bool:
    return path in ADMIN_PATHS or path.startswith(ADMIN_PREFIX)


def is_private_path(path: str) -> bool:
    """Whether the path is neither a web page nor a health check."""
    return path not in PUBLIC_PATHS and not path.startswith(PUBLIC_PREFIX)


class KeyRing:
    """The server's keys."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._secret = secrets.token_bytes(32)
        self._digests = [self._digest(item.key.encode()) for item in keys]
        self._names = [item.name for item in keys]

    def name_of(self, label: str) -> str:
        """The name of the key of a tenant, by its label, or empty."""
        for digest, name in zip(self._digests, self._names, strict=True):
            if label and digest.hex().startswith(label):
                return name
        return ""

    def owner(self, scope: Scope) -> str:
        """Return the digest of the client's key, or "" if it sends no valid key.

        Every key is compared in constant time, so that timing reveals nothing. Invalid keys beside
        a valid one do not change the tenant: a client could make up any number of them.
        """
        sent = [
            self._digest(key.encode("latin-1")) for key in _sent_keys(scope)
        ]  # latin-1 restores the bytes of the header
        known = [ours for key in sent for ours in self._digests if hmac.compare_digest(key, ours)]
        return known[0].hex() if known else ""

    def _digest(self, key: bytes) -> bytes:
        return hmac.digest(self._secret, key, "sha256")


class KeyGuard(HttpMiddleware):
    """Requires one of `keys` on paths for which `needs_key` is true."""

    def __init__(
        self, app: ASGIApp, keys: KeyRing, needs_key: Callable[[str], bool], refusal: str
    ) -> None:
        super().__init__(app)
        self._keys = keys
        self._needs_key = needs_key
        self._refusal = refusal

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if self._needs_key(route_path(scope)) and not self._keys.owner(scope):
            app = error_response(401, self._refusal, headers={"WWW-Authenticate": "Bearer"})
        await app(scope, receive, send)


class TenantLabel(HttpMiddleware):
    """Sets `current_tenant`. Requests with the same key belong to the same tenant."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        super().__init__(app)
        self._keys = keys

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        current_tenant.set(self._keys.owner(scope))
        await self.app(scope, receive, send)


def _sent_keys(scope: Scope) -> list[str]:
    """The keys in a request's Authorization and x-api-key headers."""
    headers = Headers(scope=scope)
    scheme, _, key = headers.get("authorization", "").partition(" ")
    sent = [key] if scheme.lower() == "bearer" else []
    sent += headers.getlist("x-api-key")[:1]  # used by Anthropic's clients
    return [key.strip() for key in sent]


def tenant_label() -> str:
    """The current tenant's label in the engine."""
    return current_tenant.get()[:MAX_LABEL_LENGTH]


def salt_by_tenant(cache_salt: str | None) -> str | None:
    """Make `cache_salt` unique to the current tenant.

    The digest has a fixed length, so salts of different tenants never collide.
    """
    tenant = current_tenant.get()
    if not tenant:
        return cache_salt
    return tenant if cache_salt is None else f"{tenant}:{cache_salt}"
