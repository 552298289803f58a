"""AsyncEngineClient: drives an engine in another process from an event loop. No torch.

The ledger owns the requests. A dispatch runs them on an engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from penstock.config import EngineConfig, ServerConfig
from penstock.engine.dispatch import Dispatch
from penstock.engine.ledger import DeltaStream, Ledger
from penstock.engine.messages import EngineInfo, EngineStats
from penstock.engine.observer import Observer, RequestRecord
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

    def spawn(self) -> None:
        """Start the engine process. `load` then loads the model."""
        self._dispatch = Dispatch(self.ledger, self._config)

    async def load(self, config: EngineConfig) -> EngineInfo:
        """Load the model in the engine. Raises the engine's error if that fails."""
        return await self._dispatch.load(config)

    async def close(self) -> None:
        """Stop the process. Unfinished requests get `EngineDeadError`."""
        self.ledger.fail_all(EngineDeadError("the server is shutting down"))
        await self._dispatch.close()

    def kill(self) -> None:
        """Kill the process without a clean shutdown."""
        self._dispatch.kill()

    @property
    def observers(self) -> list[Observer]:
        return self.ledger.observers

    @property
    def records(self) -> dict[str, RequestRecord]:
        """Unfinished requests, in order of submission."""
        return self.ledger.records

    @property
    def info(self) -> EngineInfo | None:
        """Limits and properties of the engine. None until it has loaded its model."""
        return self._dispatch.info

    @property
    def stats(self) -> EngineStats | None:
        return self._dispatch.stats

    @property
    def is_healthy(self) -> bool:
        """Whether an engine is running and accepts requests now."""
        return self._dispatch.is_healthy

    @property
    def is_lost(self) -> bool:
        """Whether the engine is gone and will not be restarted."""
        return self._dispatch.is_lost

    async def wait_until_lost(self) -> EngineDeadError:
        """Wait until the engine is gone for good. Returns the reason."""
        return await self._dispatch.wait_until_lost()

    def submit(self, requests: Sequence[EngineRequest]) -> DeltaStream:
        """Submit requests. Returns one stream with the deltas of all of them.

        Requests wait here while the engine restarts.
        """
        if self.info is None or self.is_lost:
            raise EngineDeadError("the engine is not running; nothing can be run on this server")
        stream = self.ledger.open(requests, self.finish)
        self._dispatch.add([request.request_id for request in requests])
        return stream

    def finish(self, request_ids: Sequence[str], reason: FinishReason) -> None:
        """End requests early. Ids of finished requests are ignored."""
        known = [request_id for request_id in request_ids if request_id in self.records]
        for request_id in known:
            self.ledger.retire(self.records[request_id], reason)
        self._dispatch.recall(known)

    def fail(self, request_ids: Sequence[str], error: Exception) -> None:
        """Fail these requests now. Their streams raise `error`."""
        for request_id in request_ids:
            self.ledger.fail(self.records[request_id], error)
        self._dispatch.recall(request_ids)

    def fail_all(self, error: Exception) -> None:
        """Fail all requests now. Their streams raise `error`."""
        self.fail(list(self.records), error)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests. Their streams get a last delta with the reason ABORT."""
        for request_id in request_ids:
            record = self.records.get(request_id)
            if record is not None:
                delta = EngineDelta(request_id=request_id, finish_reason=FinishReason.ABORT)
                self.ledger.take(record, delta, time.monotonic())
        self._dispatch.recall(request_ids)

    async def call(self, method: str, *args: Any) -> Any:
        """Run a method of `EngineCore`, in order with the requests sent before and after."""
        return await self._dispatch.call(method, *args)

    def _on_retire(self, record: RequestRecord) -> None:
        self._dispatch.forget(record.request_id)
