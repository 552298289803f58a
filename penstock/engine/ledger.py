"""Ledger: owns every unfinished request, its tokens so far, and the stream that waits for them.

It knows nothing of engines. A dispatch reports the deltas of requests here, possibly from another
engine after a restart. Each token is delivered exactly once.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from penstock.engine.observer import Observer, RequestRecord
from penstock.protocol.delta import EngineDelta, FinishReason
from penstock.protocol.request import EngineRequest

Finish = Callable[[Sequence[str], FinishReason], None]


class DeltaSink(Protocol):
    """Where the deltas of a request go."""

    def push(self, delta: EngineDelta) -> None: ...

    def fail(self, error: Exception) -> None: ...


class DeltaStream:
    """The deltas of some requests, in batches as they arrive, until all have finished.

    Iteration raises `EngineDeadError` if the engine is gone for good, `CrashFault` if one of the
    requests keeps killing it, and any error given to `fail`. Close the stream when done: that
    aborts unfinished requests.
    """

    def __init__(self, request_ids: Iterable[str], finish: Finish) -> None:
        self._finish = finish
        self._unfinished = set(request_ids)
        self._deltas: list[EngineDelta] = []
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None  # wakes the iterator

    def push(self, delta: EngineDelta) -> None:
        if delta.finish_reason is not None:
            self._unfinished.discard(delta.request_id)
        self._deltas.append(delta)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Make the iterator raise `error`. Deltas that were not read are lost."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def finish(self, request_ids: Sequence[str], reason: FinishReason) -> None:
        """End some of the requests early. They get no more deltas."""
        self._unfinished.difference_update(request_ids)
        self._finish(request_ids, reason)

    def close(self) -> None:
        """Abort unfinished requests. Safe to call twice."""
        unfinished, self._unfinished = list(self._unfinished), set()
        self._finish(unfinished, FinishReason.ABORT)

    def __aiter__(self) -> AsyncIterator[list[EngineDelta]]:
        return self

    async def __anext__(self) -> list[EngineDelta]:
        if not self._deltas and self._error is None:
            if not self._unfinished:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._error is not None:
            raise self._error
        deltas, self._deltas = self._deltas, []
        return deltas


class Ledger:
    """`on_retire` is called for each request that ends, for any reason."""

    def __init__(
        self, observers: Sequence[Observer], on_retire: Callable[[RequestRecord], None]
    ) -> None:
        self.observers = list(observers)
        self.records: dict[str, RequestRecord] = {}  # in order of submission
        self.num_by_tenant = Counter[str]()  # unfinished requests
        self._sinks: dict[str, DeltaSink] = {}
        self._on_retire = on_retire

    def open(self, requests: Sequence[EngineRequest], finish: Finish) -> DeltaStream:
        """Add requests. Returns one stream with the deltas of all of them."""
        stream = DeltaStream([request.request_id for request in requests], finish)
        for request in requests:
            self.add(request, stream)
        return stream

    def add(self, request: EngineRequest, sink: DeltaSink) -> None:
        """Add a request. Its deltas go to `sink`."""
        record = RequestRecord(request, submitted_at=time.monotonic())
        self.records[request.request_id] = record
        self._sinks[request.request_id] = sink
        self.num_by_tenant[request.tenant] += 1
        for observer in self.observers:
            observer.on_submit(record)

    def replay(self, request_id: str) -> EngineRequest:
        """Return the request to send, so that it continues after the tokens it already has."""
        record = self.records[request_id]
        if not (record.token_ids or record.has_run):
            return record.request
        seen = record.request.output_token_ids + record.token_ids
        return msgspec.structs.replace(
            record.request, output_token_ids=seen, has_run=record.has_run
        )

    def take(self, record: RequestRecord, delta: EngineDelta, now: float) -> None:
        """Record a delta and push it to the request's sink."""
        if record.first_token_at is not None and record.num_engines > 1:
            # A replay may find its own prompt in the cache: the first count is the true one.
            delta = msgspec.structs.replace(delta, num_cached_tokens=record.num_cached_tokens)
        record.num_cached_tokens = max(record.num_cached_tokens, delta.num_cached_tokens)
        if delta.token_ids:
            self._take_tokens(record, delta, now)
        elif delta.payload is not None:
            record.prefill_s = delta.prefill_s
        sink = self._sinks[delta.request_id]
        if delta.finish_reason is not None:
            self.retire(record, delta.finish_reason)
        sink.push(delta)

    def _take_tokens(self, record: RequestRecord, delta: EngineDelta, now: float) -> None:
        record.token_ids += delta.token_ids
        previous_at, record.last_token_at = record.last_token_at, now
        if record.first_token_at is None:
            record.first_token_at, record.prefill_s = now, delta.prefill_s
        for observer in self.observers:
            observer.on_tokens(record, len(delta.token_ids), previous_at)

    def end(self, request_ids: Iterable[str], reason: FinishReason) -> list[RequestRecord]:
        """Remove requests that end early. Ids of finished requests are ignored."""
        known = [self.records[item] for item in request_ids if item in self.records]
        for record in known:
            self.retire(record, reason)
        return known

    def retire(self, record: RequestRecord, reason: FinishReason) -> None:
        """Remove a request that has ended."""
        del self.records[record.request_id]
        del self._sinks[record.request_id]
        self.num_by_tenant[record.request.tenant] -= 1
        record.finished_at, record.finish_reason = time.monotonic(), reason
        self._on_retire(record)
        for observer in self.observers:
            observer.on_finish(record)

    def report_search(self, records: Sequence[RequestRecord]) -> None:
        """Tell the observers of beam searches that ended. See `Observer.on_search`."""
        for observer in self.observers:
            observer.on_search(records)

    def fail(self, record: RequestRecord, error: Exception) -> None:
        """End a request. Its sink gets `error`."""
        self._sinks[record.request_id].fail(error)
        self.retire(record, FinishReason.ERROR)

    def fail_all(self, error: Exception) -> None:
        for record in list(self.records.values()):
            self.fail(record, error)
