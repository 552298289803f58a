"""Which HTTP requests use which adapter: from their admission until their response was sent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.types import Receive, Scope, Send

from penstock.protocol.adapter import Adapter
from penstock.server.http.asgi import HttpMiddleware
from penstock.server.http.errors import NotFound


@dataclass(eq=False)
class AdapterVersion:
    """What a name stands for, or stood for while requests still use it."""

    adapter: Adapter
    root: str  # the path, hub id or package as it was given
    parent: str  # the base model's name
    created: int
    is_pinned: bool = False
    last_used: int = 0  # a count of uses, for the order
    was_unloaded: bool = False  # its requests must end
    _num_holds: int = 0
    _is_unused: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._is_unused.set()

    @property
    def name(self) -> str:
        return self.adapter.name

    def take(self) -> None:
        self._num_holds += 1
        self._is_unused.clear()

    def release(self) -> None:
        self._num_holds -= 1
        if not self._num_holds:
            self._is_unused.set()

    async def wait_until_unused(self) -> None:
        await self._is_unused.wait()


class Hold:
    """The adapter of one HTTP request, if its model is one."""

    def __init__(self, version: AdapterVersion | None = None) -> None:
        self._version: AdapterVersion | None = None
        if version is not None:
            self.take(version)

    def take(self, version: AdapterVersion | None) -> None:
        """Use this version instead of the one before."""
        if version is not None:
            version.take()
        before, self._version = self._version, version
        if before is not None:
            before.release()

    def release(self) -> None:
        self.take(None)

    def copy(self) -> Hold:
        """Another hold of the same version."""
        return Hold(self._version)

    @property
    def adapter(self) -> Adapter | None:
        """The adapter to run a request with. Raises `NotFound` once it must not run any more."""
        version = self._version
        if version is None:
            return None
        if version.was_unloaded:
            raise was_unloaded(version.name)
        return version.adapter


current_hold: ContextVar[Hold | None] = ContextVar("current_hold", default=None)
"""The hold of the current HTTP request. None if the server has no adapters."""


class AdapterHolds(HttpMiddleware):
    """Middleware that gives each HTTP request a hold and releases it at the end."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        hold = Hold()
        current_hold.set(hold)
        try:
            await self.app(scope, receive, send)
        finally:
            hold.release()


@contextlib.contextmanager
def held_for_longer() -> Iterator[Hold]:
    """Tasks that are started within have their own hold, which goes on after the response.

    The caller releases it when they have ended.
    """
    hold = current_hold.get()
    hold = Hold() if hold is None else hold.copy()
    token = current_hold.set(hold)
    try:
        yield hold
    finally:
        current_hold.reset(token)


def was_unloaded(name: str) -> NotFound:
    return NotFound(f"the adapter {name!r} was unloaded while the request ran", "model")
