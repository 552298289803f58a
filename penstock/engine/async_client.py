"""AsyncEngineClient: drives engines in other processes from an event loop. No torch.

The ledger owns the requests. A set of replicas runs them, each on an engine of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from penstock.config import EngineConfig, ServerConfig
from penstock.engine.client import ReplicaStatus
from penstock.engine.ledger import DeltaSink, DeltaStream, Ledger
from penstock.engine.messages import EngineInfo
from penstock.engine.observer import Observer, RequestRecord
from penstock.engine.replica_operations import ReplicaOperations
from penstock.engine.replicas import ReplicaSet, check_cores
from penstock.protocol.delta import EngineDelta, FinishReason
from penstock.protocol.errors import EngineDeadError
from penstock.protocol.request import EngineRequest


class AsyncEngineClient:
    """Accepts requests and returns their deltas, across engine restarts.

    Call everything except the constructor from one event loop.
    """

    def __init__(self, config: ServerConfig | None = None) -> None:
        self.ledger = Ledger((), self._on_retire)
        self._config = config or ServerConfig()
        self._info: EngineInfo | None = None

    def spawn(self, config: EngineConfig) -> None:
        """Start the engine processes. `load` then loads the model.

        Raises `ConfigError` for more replicas than this machine has cores.
        """
        check_cores(config)
        self._info = None
        parallel = config.parallel
        self.replicas = ReplicaSet(
            self.ledger, self._config, parallel.num_engines, parallel.data_parallel_routing
        )

    async def load(self, config: EngineConfig) -> EngineInfo:
        """Load the model in all engines. Raises an engine's error if that fails."""
        self._info = await self.replicas.load(config)
        self.operations = ReplicaOperations(self.replicas)
        return self._info

    async def close(self) -> None:
        """Stop the processes. Unfinished requests get `EngineDeadError`."""
        self.ledger.fail_all(EngineDeadError("the server is shutting down"))
        await self.replicas.close()

    def kill(self) -> None:
        """Kill the processes without a clean shutdown."""
        self.replicas.kill()

    @property
    def observers(self) -> list[Observer]:
        return self.ledger.observers

    @property
    def records(self) -> dict[str, RequestRecord]:
        """Unfinished requests, in order of submission."""
        return self.ledger.records

    @property
    def info(self) -> EngineInfo | None:
        """Limits and properties that hold on every engine. None until all are loaded."""
        return self._info

    @property
    def config(self) -> EngineConfig:
        """What the engines were loaded with."""
        assert self.replicas.config is not None, "`load` comes first"
        return self.replicas.config

    @property
    def num_requests(self) -> int:
        """Unfinished requests."""
        return len(self.records)

    def num_requests_of(self, tenant: str) -> int:
        """Unfinished requests of one tenant."""
        return self.ledger.num_by_tenant[tenant]

    def status(self) -> list[ReplicaStatus]:
        """The replicas' states and loads, by index."""
        return [item.status for _, item in sorted(self.replicas.members.items())]

    @property
    def max_num_seqs(self) -> int:
        """Maximum number of requests that run at once, on all replicas together."""
        return self.replicas.max_num_seqs

    @property
    def is_healthy(self) -> bool:
        """Whether an engine is running and accepts requests now."""
        return self.replicas.is_healthy

    @property
    def is_lost(self) -> bool:
        """Whether all engines are gone and will not be restarted."""
        return self.replicas.is_lost

    async def wait_until_lost(self) -> EngineDeadError:
        """Wait until all engines are gone for good. Returns the reason."""
        return await asyncio.shield(self.replicas.lost)

    def submit(
        self,
        requests: Sequence[EngineRequest],
        rank: int | None = None,
        session: str | None = None,
    ) -> DeltaStream:
        """Submit requests. Returns one stream with the deltas of all of them.

        Requests wait here while no engine is running. `rank` names a replica, which is used if it
        takes requests now. Requests of one `session` go to the same replica if its load allows.
        """
        self._check_running()
        stream = self.ledger.open(requests, self.finish)
        self.replicas.add([request.request_id for request in requests], rank, session)
        return stream

    def submit_to(
        self, sink: DeltaSink, request: EngineRequest, rank: int | None, session: str | None
    ) -> None:
        """Submit a request whose deltas go to `sink`. Otherwise the same as `submit`."""
        self._check_running()
        self.ledger.add(request, sink)
        self.replicas.add([request.request_id], rank, session)

    def _check_running(self) -> None:
        if self.info is None or self.is_lost:
            raise EngineDeadError("the engine is not running; nothing can be run on this server")

    def finish(self, request_ids: Sequence[str], reason: FinishReason) -> None:
        """End requests early. Ids of finished requests are ignored."""
        self.replicas.recall(self.ledger.end(request_ids, reason))

    def fail(self, request_ids: Sequence[str], error: Exception) -> None:
        """Fail these requests now. Their streams raise `error`."""
        records = [self.records[request_id] for request_id in request_ids]
        for record in records:
            self.ledger.fail(record, error)
        self.replicas.recall(records)

    def report_search(self, records: Sequence[RequestRecord]) -> None:
        members = list(self.replicas.members)
        for record in records:
            record.replica = members[0] if len(members) == 1 else None
        self.ledger.report_search(records)

    def fail_all(self, error: Exception) -> None:
        """Fail all requests now. Their streams raise `error`."""
        self.fail(list(self.records), error)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests. Their streams get a last delta with the reason ABORT."""
        known = [self.records[item] for item in request_ids if item in self.records]
        for record in known:
            delta = EngineDelta(request_id=record.request_id, finish_reason=FinishReason.ABORT)
            self.ledger.take(record, delta, time.monotonic())
        self.replicas.recall(known)

    async def call(self, method: str, *args: Any, replica: int | None = None) -> Any:
        """Run a method of `EngineCore`, in order with the requests sent before and after.

        It runs on one replica, or on all that are running, and then the result is that of the
        first.
        """
        return await self.replicas.call(method, args, replica)

    def _on_retire(self, record: RequestRecord) -> None:
        self.replicas.forget(record)
