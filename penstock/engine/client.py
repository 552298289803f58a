"""EngineClient: what the server needs of its engines, wherever they are supervised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

from penstock.config import EngineConfig
from penstock.engine.ledger import DeltaStream
from penstock.engine.messages import EngineInfo
from penstock.engine.observer import Observer, RequestRecord
from penstock.protocol.errors import EngineDeadError
from penstock.protocol.request import EngineRequest

ReplicaState = Literal["starting", "serving", "quarantine", "restarting", "draining", "failed"]


class ReplicaStatus(msgspec.Struct, frozen=True):
    """The state and the load of one replica."""

    index: int
    state: ReplicaState
    num_requests: int  # unfinished requests on it
    num_running: int = 0  # in its engine, like the next two
    num_waiting: int = 0
    kv_cache_usage: float = 0.0


class Operations(Protocol):
    """Changes the replicas while they serve. See `ReplicaOperations`."""

    async def add(self) -> int: ...

    async def drain(self, index: int, timeout_s: float) -> None: ...

    async def restart(self, index: int, timeout_s: float) -> None: ...

    async def remove(self, index: int, timeout_s: float) -> None: ...

    async def rolling_restart(
        self, timeout_s: float, config: EngineConfig | None = None
    ) -> None: ...


class EngineClient(Protocol):
    """Runs requests on engines. See `AsyncEngineClient`."""

    @property
    def operations(self) -> Operations: ...

    @property
    def observers(self) -> list[Observer]:
        """They follow the requests of this process."""

    @property
    def info(self) -> EngineInfo | None: ...

    @property
    def config(self) -> EngineConfig:
        """What the engines were loaded with."""

    @property
    def max_num_seqs(self) -> int: ...

    @property
    def is_healthy(self) -> bool: ...

    @property
    def is_lost(self) -> bool: ...

    @property
    def num_requests(self) -> int:
        """Unfinished requests of the whole server."""

    def num_requests_of(self, tenant: str) -> int:
        """Those of one tenant."""

    def status(self) -> list[ReplicaStatus]:
        """The replicas, by index."""

    async def wait_until_lost(self) -> EngineDeadError: ...

    def submit(
        self,
        requests: Sequence[EngineRequest],
        rank: int | None = None,
        session: str | None = None,
    ) -> DeltaStream: ...

    def report_search(self, records: Sequence[RequestRecord]) -> None:
        """Tell the observers of beam searches that ended. See `Observer.on_search`."""

    def fail_all(self, error: Exception) -> None:
        """Fail all requests of this process now."""

    async def call(self, method: str, *args: Any, replica: int | None = None) -> Any: ...
