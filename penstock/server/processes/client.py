"""ParentClient: an API process's engines, which its parent supervises."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from penstock.config import EngineConfig
from penstock.engine.client import ReplicaStatus
from penstock.engine.ledger import DeltaStream, Ledger
from penstock.engine.messages import EngineInfo
from penstock.engine.observer import Observer, RequestRecord
from penstock.protocol.delta import EngineDelta, FinishReason
from penstock.protocol.errors import EngineDeadError
from penstock.protocol.request import EngineRequest
from penstock.server.processes.channel import Add, Channel, Failed, FinishRequests
from penstock.server.processes.messages import Begin, Status


class ParentOperations:
    """Changes the replicas, in the parent."""

    def __init__(self, channel: Channel, client: ParentClient) -> None:
        self._channel = channel
        self._client = client

    async def add(self) -> int:
        return await self._channel.call(int, "add_replica")

    async def drain(self, index: int, timeout_s: float) -> None:
        await self._channel.call(Any, "drain_replica", index, timeout_s)

    async def restart(self, index: int, timeout_s: float) -> None:
        await self._channel.call(Any, "restart_replica", index, timeout_s)

    async def remove(self, index: int, timeout_s: float) -> None:
        await self._channel.call(Any, "remove_replica", index, timeout_s)

    async def rolling_restart(self, timeout_s: float, config: EngineConfig | None = None) -> None:
        await self._channel.call(Any, "rolling_restart", timeout_s, config)
        self._client.config = config or self._client.config


class ParentClient:
    """An `EngineClient`. This process has the requests of its own connections in its ledger."""

    def __init__(self, channel: Channel, begin: Begin) -> None:
        self.operations = ParentOperations(channel, self)
        self.ledger = Ledger((), lambda record: None)
        self.config = begin.config
        self.lost: asyncio.Future[EngineDeadError] = asyncio.get_running_loop().create_future()
        self._info = begin.info
        self._status = begin.status
        self._channel = channel

    # -- what the parent tells

    def take_status(self, status: Status) -> None:
        self._status = status

    def take(self, deltas: Sequence[EngineDelta]) -> None:
        now, records = time.monotonic(), self.ledger.records
        for delta in deltas:
            if (record := records.get(delta.request_id)) is not None:  # its client may have left
                self.ledger.take(record, delta, now)

    def take_failure(self, failed: Failed) -> None:
        record = self.ledger.records.get(failed.request_id)
        if record is not None:
            self.ledger.fail(record, failed.problem.error())

    def lose(self, error: EngineDeadError) -> None:
        """All engines are gone for good."""
        self.ledger.fail_all(error)
        if not self.lost.done():
            self.lost.set_result(error)

    # -- what the server asks

    @property
    def observers(self) -> list[Observer]:
        return self.ledger.observers

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def max_num_seqs(self) -> int:
        return self._status.max_num_seqs

    @property
    def is_healthy(self) -> bool:
        return self._status.is_healthy

    @property
    def is_lost(self) -> bool:
        return self.lost.done()

    @property
    def num_requests(self) -> int:
        return len(self.ledger.records) + self._status.num_others

    def num_requests_of(self, tenant: str) -> int:
        others = self._status.others_by_tenant.get(tenant, 0)
        return self.ledger.num_by_tenant[tenant] + others

    def status(self) -> list[ReplicaStatus]:
        return self._status.replicas

    async def wait_until_lost(self) -> EngineDeadError:
        return await asyncio.shield(self.lost)

    def submit(
        self,
        requests: Sequence[EngineRequest],
        rank: int | None = None,
        session: str | None = None,
    ) -> DeltaStream:
        """Submit requests. Returns one stream with the deltas of all of them."""
        if self.is_lost:
            raise EngineDeadError("the engine is not running; nothing can be run on this server")
        stream = self.ledger.open(requests, self.finish)
        self._channel.send(Add(list(requests), rank, session))
        return stream

    def finish(self, request_ids: Sequence[str], reason: FinishReason) -> None:
        """End requests early. Ids of finished requests are ignored."""
        if known := self.ledger.end(request_ids, reason):
            self._channel.send(FinishRequests([item.request_id for item in known], reason))

    def report_search(self, records: Sequence[RequestRecord]) -> None:
        self.ledger.report_search(records)
        self._channel.tell("report_search", records)

    def fail_all(self, error: Exception) -> None:
        """Fail all requests of this process now. Their streams raise `error`."""
        request_ids = list(self.ledger.records)
        self.ledger.fail_all(error)
        if request_ids:
            self._channel.send(FinishRequests(request_ids, FinishReason.ERROR))

    async def call(self, method: str, *args: Any, replica: int | None = None) -> Any:
        return await self._channel.call(Any, "call_engines", method, list(args), replica)
