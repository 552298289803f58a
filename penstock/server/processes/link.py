"""ApiLink: the parent's end of one API process: its requests, and the methods that it calls."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.config import EngineConfig
from penstock.config.lora_modules import LoRAModule
from penstock.engine.async_client import AsyncEngineClient
from penstock.engine.observer import RequestRecord
from penstock.protocol.delta import EngineDelta, FinishReason
from penstock.protocol.errors import EngineDeadError, InputError
from penstock.protocol.request import EngineRequest
from penstock.server.adapters.holds import AdapterVersion
from penstock.server.adapters.registry import AdapterRegistry
from penstock.server.http.exchange import HttpExchange
from penstock.server.operations.metrics import ServerMetrics
from penstock.server.processes.channel import (
    Add,
    Channel,
    DeltaBatch,
    Failed,
    FinishRequests,
    Message,
    Problem,
)
from penstock.server.processes.messages import AdapterInfo, ApiHello, Begin, Entry, Status
from penstock.server.responses.store import MemoryStore

T = TypeVar("T")


@dataclass
class Parent:
    """What all links of a server share."""

    client: AsyncEngineClient
    store: MemoryStore
    is_fair: bool  # the scheduling
    adapters: AdapterRegistry | None = None
    metrics: ServerMetrics | None = None
    links: list[ApiLink] = field(default_factory=list)
    shows_fingerprint: bool = True
    adapter_numbers: Iterator[int] = field(default_factory=itertools.count)

    async def sync(self) -> None:
        """Wait until all API processes have seen what they were told."""
        await self.call_all("sync")

    async def call_all(self, method: str, *args: Any, but: ApiLink | None = None) -> None:
        """Call a method of all API processes. Those that die meanwhile do not count."""
        others = [item for item in self.links if item.has_begun and item is not but]
        calls: list[Awaitable[None]] = [item.channel.call(Any, method, *args) for item in others]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, EngineDeadError):
                raise result


class Forward:
    """A sink of one request of an API process."""

    __slots__ = ("_link", "_request_id")

    def __init__(self, link: ApiLink, request_id: str) -> None:
        self._link = link
        self._request_id = request_id

    def push(self, delta: EngineDelta) -> None:
        self._link.push(delta)

    def fail(self, error: Exception) -> None:
        self._link.fail(self._request_id, error)


class ApiLink:
    """One API process, as the parent knows it. Public methods below `-- calls` are its to call."""

    def __init__(self, parent: Parent, on_end: Callable[[ApiLink], None]) -> None:
        self.channel = Channel(self, self._take, self._end)
        self.has_begun = False
        self.num_handed = 0  # connections that it was given
        self._num_seen = 0  # of those, that it has taken
        self._num_open = 0  # of those, that are open
        self._parent = parent
        self._on_end = on_end
        self._requests: dict[str, EngineRequest] = {}  # unfinished
        self._deltas: list[EngineDelta] = []  # not sent yet
        self._versions: dict[int, AdapterVersion] = {}  # that it may use
        self._status: Status | None = None  # the last that it was told
        self._has_store = False  # it changes an entry
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def open(self, sock: socket.socket, hello: ApiHello) -> None:
        await self.channel.open(sock)
        self.channel.tell("hello", hello)

    def begin(self) -> None:
        """The engines are loaded: let it serve."""
        client, adapters = self._parent.client, self._parent.adapters
        assert client.info is not None
        versions = adapters.versions if adapters is not None else []
        self._status = self._status_now()
        begin = Begin(
            *(client.info, client.config, self._status),
            [self._give(version) for version in versions],
            self._parent.shows_fingerprint,
        )
        self.channel.tell("begin", begin)
        self.has_begun = True

    @property
    def num_connections(self) -> int:
        """Open connections, with those on their way to it."""
        return self._num_open + self.num_handed - self._num_seen

    def _end(self) -> None:
        """The process is gone: end its requests, and release what it had."""
        self._parent.client.finish(list(self._requests), FinishReason.ABORT)
        self._requests.clear()
        for version in self._versions.values():
            version.release()
        self._versions.clear()
        self.unlock_store()
        if not self.started.done():
            self.started.set_exception(EngineDeadError("the API process ended while it started"))
            self.started.exception()  # nobody may wait for it
        self._on_end(self)

    # -- requests

    def _take(self, message: Message) -> None:
        if isinstance(message, Add):
            self._add(message)
        else:
            assert isinstance(message, FinishRequests)
            for request_id in message.request_ids:
                self._requests.pop(request_id, None)
            self._parent.client.finish(message.request_ids, message.reason)

    def _add(self, message: Add) -> None:
        for request in message.requests:
            request_id = request.request_id
            if request.adapter is not None and self._parent.adapters is not None:
                self._parent.adapters.use(request.adapter.name)
            self._requests[request_id] = request
            try:
                self._parent.client.submit_to(
                    Forward(self, request_id), request, message.rank, message.session
                )
            except EngineDeadError as error:
                self.fail(request_id, error)

    def push(self, delta: EngineDelta) -> None:
        """Pass a delta on, with the others that come from the same messages of engines."""
        if not self._deltas:
            asyncio.get_running_loop().call_soon(self._flush)
        self._deltas.append(delta)
        if delta.finish_reason is not None:
            del self._requests[delta.request_id]

    def fail(self, request_id: str, error: Exception) -> None:
        self._flush()
        del self._requests[request_id]
        self.channel.send(Failed(request_id, Problem.of(error)))

    def _flush(self) -> None:
        if self._deltas:
            deltas, self._deltas = self._deltas, []
            self.channel.send(DeltaBatch(deltas))

    # -- what it is told

    def _status_now(self) -> Status:
        parent, client = self._parent, self._parent.client
        by_tenant = Counter[str]()
        if parent.is_fair:
            by_tenant = +client.ledger.num_by_tenant
            by_tenant.subtract(item.tenant for item in self._requests.values())
        return Status(
            client.status(),
            client.max_num_seqs,
            client.is_healthy,
            client.num_requests - len(self._requests),
            dict(+by_tenant),
        )

    def tell_status(self) -> None:
        """Tell it the status if that has changed."""
        if self.has_begun and (status := self._status_now()) != self._status:
            self._status = status
            self.channel.tell("take_status", status)

    def add_adapter(self, version: AdapterVersion) -> None:
        if self.has_begun:
            self.channel.tell("add_adapter", self._give(version))

    def _give(self, version: AdapterVersion) -> AdapterInfo:
        number = next(self._parent.adapter_numbers)
        version.take()
        self._versions[number] = version
        return AdapterInfo(number, version.adapter, version.root, version.parent, version.created)

    def retire_adapter(self, version: AdapterVersion, ends_requests: bool) -> None:
        for number, item in self._versions.items():
            if item is version:
                self.channel.tell("retire_adapter", number, ends_requests)

    # -- calls

    def start(self) -> None:
        """It serves."""
        if not self.started.done():
            self.started.set_result(None)

    def give_up(self, problem: Problem) -> None:
        """It cannot serve."""
        if not self.started.done():
            self.started.set_exception(problem.error())

    def count_connections(self, num_seen: int, num_open: int) -> None:
        self._num_seen, self._num_open = num_seen, num_open

    async def render_metrics(self) -> bytes:
        return self._metrics.render()

    def report_search(self, records: list[RequestRecord]) -> None:
        self._parent.client.report_search(records)

    def count_exchange(self, exchange: HttpExchange) -> None:
        self._metrics.http.on_exchange(exchange)

    def count_tool_turn(self, is_streaming: bool, called: bool, api: str) -> None:
        self._metrics.observer.on_tool_turn(is_streaming, called, api)

    def count_media_lookup(self, is_hit: bool) -> None:
        self._metrics.observer.on_media_lookup(is_hit)

    @property
    def _metrics(self) -> ServerMetrics:
        assert self._parent.metrics is not None, "it has begun"
        return self._parent.metrics

    async def call_engines(self, method: str, args: list[Any], replica: int | None) -> Any:
        return await self._parent.client.call(method, *args, replica=replica)

    # Changes of replicas go on to their end, also if this process dies.

    async def add_replica(self) -> int:
        return await self._change(self._parent.client.operations.add())

    async def drain_replica(self, index: int, timeout_s: float) -> None:
        await self._change(self._parent.client.operations.drain(index, timeout_s))

    async def restart_replica(self, index: int, timeout_s: float) -> None:
        await self._change(self._parent.client.operations.restart(index, timeout_s))

    async def remove_replica(self, index: int, timeout_s: float) -> None:
        await self._change(self._parent.client.operations.remove(index, timeout_s))

    async def rolling_restart(self, timeout_s: float, config: EngineConfig | None) -> None:
        if config is None:
            await self._change(self._parent.client.operations.rolling_restart(timeout_s))
        else:
            await self._change(self._roll_to(timeout_s, config))

    async def _roll_to(self, timeout_s: float, config: EngineConfig) -> None:
        """Roll another version through. This API process knows when it begins and ends."""
        parent = self._parent
        parent.shows_fingerprint = False
        await parent.call_all("hide_fingerprint", but=self)
        try:
            await parent.client.operations.rolling_restart(timeout_s, config)
        finally:
            parent.shows_fingerprint = True
            await parent.call_all("show_version", parent.client.config, but=self)

    async def _change(self, work: Awaitable[T]) -> T:
        try:
            return await asyncio.shield(work)
        finally:
            self.tell_status()  # before the answer

    # -- calls: adapters

    async def load_adapter(
        self, name: str, path: str, base_model_name: str | None, replace: bool, pin: bool
    ) -> None:
        module = LoRAModule(name, path, base_model_name)
        await self._adapters.load(module, replace=replace, pin=pin)
        await self._parent.sync()

    async def unload_adapter(self, name: str, end_requests: bool) -> None:
        await self._adapters.unload(name, end_requests=end_requests)
        await self._parent.sync()

    async def resolve_adapter(self, name: str) -> bool:
        return await self._adapters.resolve(name) is not None

    def release_adapter(self, number: int) -> None:
        """It does not use this version any more, which was retired."""
        self._versions.pop(number).release()

    @property
    def _adapters(self) -> AdapterRegistry:
        if self._parent.adapters is None:
            raise InputError("this server has no LoRA adapters: start it with --enable-lora")
        return self._parent.adapters

    # -- calls: stored responses

    async def put_stored(self, owner: str, entry: Entry) -> bool:
        assert entry.stored is not None
        return await self._parent.store.put(owner, entry.stored)

    async def get_stored(self, owner: str, stored_id: str) -> Entry:
        return Entry.of(await self._parent.store.get(owner, stored_id))

    async def delete_stored(self, owner: str, stored_id: str) -> bool:
        return await self._parent.store.delete(owner, stored_id)

    async def lock_store(self) -> None:
        await self._parent.store.changing().acquire()
        self._has_store = True

    def unlock_store(self) -> None:
        if self._has_store:
            self._has_store = False
            self._parent.store.changing().release()

    async def stop_response(self, owner: str, response_id: str) -> None:
        """Cancel what another API process runs in the background."""
        await self._parent.call_all("stop_response", owner, response_id, but=self)
