"""What an API process shares with the others through the parent: stored responses, adapters."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

from penstock.config import ServerConfig
from penstock.config.lora_modules import LoRAModule, why_bad_name
from penstock.server.adapters.holds import AdapterVersion, current_hold
from penstock.server.processes.channel import Channel
from penstock.server.processes.messages import AdapterInfo, Entry
from penstock.server.responses.store import ResponseStore, Stored, memory_store


class ParentStore(ResponseStore):
    """The responses and conversations that the parent stores."""

    num_entries = 0  # only the parent shows these
    num_bytes = 0

    def __init__(self, channel: Channel, config: ServerConfig) -> None:
        self._channel = channel
        self._limits = memory_store(config)  # an empty one

    def refusal(self, num_bytes: int, num_items: int) -> str | None:
        return self._limits.refusal(num_bytes, num_items)

    async def put(self, owner: str, stored: Stored) -> bool:
        return await self._channel.call(bool, "put_stored", owner, Entry.of(stored))

    async def get(self, owner: str, stored_id: str) -> Stored | None:
        entry: Entry = await self._channel.call(Entry, "get_stored", owner, stored_id)
        return entry.stored

    async def delete(self, owner: str, stored_id: str) -> bool:
        return await self._channel.call(bool, "delete_stored", owner, stored_id)

    def changing(self) -> AbstractAsyncContextManager[None]:
        return self._locked()

    @contextlib.asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        locking: asyncio.Future[None] = asyncio.ensure_future(self._channel.call(Any, "lock_store"))
        try:
            await asyncio.shield(locking)
            yield
        finally:  # once it has come, also if nobody waits for it any more
            locking.add_done_callback(lambda _: self._channel.tell("unlock_store"))


class ParentAdapters:
    """The adapters of the parent's registry, and which requests of this process use them."""

    def __init__(self, channel: Channel, resolves: bool) -> None:
        self._channel = channel
        self._resolves = resolves  # there is a resolver of names
        self._by_number: dict[int, AdapterVersion] = {}
        self._by_name: dict[str, AdapterVersion] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    # -- what the parent tells

    def add(self, info: AdapterInfo) -> None:
        version = AdapterVersion(info.adapter, info.root, info.parent, info.created)
        self._by_number[info.number] = version
        self._by_name.pop(version.name, None)
        self._by_name[version.name] = version

    def retire(self, number: int, ends_requests: bool) -> None:
        """Tell the parent once no request uses this version."""
        version = self._by_number.get(number)
        if version is None:
            return
        version.was_unloaded |= ends_requests
        if self._by_name.get(version.name) is version:
            del self._by_name[version.name]
        task = asyncio.ensure_future(self._release(number, version))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _release(self, number: int, version: AdapterVersion) -> None:
        await version.wait_until_unused()
        if self._by_number.pop(number, None) is not None:  # it may be retired twice
            self._channel.tell("release_adapter", number)

    # -- what the server asks

    @property
    def versions(self) -> list[AdapterVersion]:
        return list(self._by_name.values())

    def find(self, name: str) -> AdapterVersion | None:
        return self._by_name.get(name)

    async def hold(self, name: str) -> bool:
        """Let the current HTTP request use the adapter of this name. False if there is none."""
        version = self._by_name.get(name)
        if version is None and self._resolves and why_bad_name(name) is None:
            await self._channel.call(bool, "resolve_adapter", name)
            version = self._by_name.get(name)  # it was told before the answer
        if version is None:
            return False
        hold = current_hold.get()
        assert hold is not None, "AdapterHolds is missing from the app"
        hold.take(version)
        return True

    async def load(self, module: LoRAModule, *, replace: bool, pin: bool) -> AdapterVersion:
        name, path, base = module.name, module.path, module.base_model_name
        await self._channel.call(Any, "load_adapter", name, path, base, replace, pin)
        return self._by_name[name]

    async def unload(self, name: str, *, end_requests: bool) -> None:
        await self._channel.call(Any, "unload_adapter", name, end_requests)
