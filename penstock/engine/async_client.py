"""AsyncEngineClient: the engine in another process, driven from an event loop without torch.

The engine may die and another take its place: requests go on where they were.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Sequence

import msgspec

from penstock.config import EngineConfig, ServerConfig
from penstock.engine import messages
from penstock.engine.handle import Death, EngineHandle
from penstock.engine.messages import EngineInfo, EngineStats
from penstock.engine.observer import Observer, RequestRecord
from penstock.engine.supervisor import Aftermath, Quarantine, Supervisor
from penstock.protocol.delta import EngineDelta, FinishReason
from penstock.protocol.errors import CrashFault, EngineDeadError, waited_too_long
from penstock.protocol.request import EngineRequest

logger = logging.getLogger(__name__)

LOOKS_PER_WAIT = 8  # how finely the time is measured that requests wait here


class DeltaStream:
    """The deltas of some requests, in batches as they come, until all have finished.

    Iterating raises `EngineDeadError` if the engine dies for good, `CrashFault` if one of the
    requests keeps killing it, and whatever `fail` is given. Close it when done: that aborts what
    is unfinished.
    """

    def __init__(self, client: AsyncEngineClient, request_ids: Iterable[str]) -> None:
        self._client = client
        self._unfinished = set(request_ids)
        self._deltas: list[EngineDelta] = []
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def push(self, delta: EngineDelta) -> None:
        if delta.finish_reason is not None:
            self._unfinished.discard(delta.request_id)
        self._deltas.append(delta)
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Make whoever iterates get `error` in place of what would come next."""
        self._error = self._error or error
        self._news.set()

    def finish(self, request_ids: Sequence[str], reason: FinishReason) -> None:
        """End some of the requests early, for `reason`; no more deltas come for them."""
        self._unfinished.difference_update(request_ids)
        self._client.finish(request_ids, reason)

    def close(self) -> None:
        """Abort what is unfinished. Safe to call twice."""
        unfinished, self._unfinished = list(self._unfinished), set()
        self._client.finish(unfinished, FinishReason.ABORT)

    def __aiter__(self) -> AsyncIterator[list[EngineDelta]]:
        return self

    async def __anext__(self) -> list[EngineDelta]:
        if not self._deltas and self._error is None:
            if not self._unfinished:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            raise self._error
        deltas, self._deltas = self._deltas, []
        return deltas


class AsyncEngineClient:
    """Keeps an engine process running, sends it requests and hands out their deltas.

    It keeps every unfinished request with the tokens that came for it (`records`). When the engine
    dies, they are sent to its successor with these tokens, and go on: a token is handed out once,
    whatever the engines did. Requests that may have killed the engine are run alone first.
    Everything but the constructor belongs to one event loop.
    """

    def __init__(
        self, config: ServerConfig | None = None, observers: Sequence[Observer] = ()
    ) -> None:
        self.observers = list(observers)
        self.records: dict[str, RequestRecord] = {}  # unfinished requests, in order of submission
        self.stats: EngineStats | None = None  # the latest, of the engine that runs
        self.info: EngineInfo | None = None  # of the latest engine
        self._config = config or ServerConfig()
        self._quarantine = Quarantine(self._config.max_request_crashes)
        self._held: dict[str, None] = {}  # not on the engine, or only there for a trial
        self._streams: dict[str, DeltaStream] = {}
        self._queue_timeout_s: float | None = None
        self._waits_timer: asyncio.TimerHandle | None = None
        self._had_progress = False  # on this engine
        self._is_closing = False

    # -- the engine

    def spawn(self) -> None:
        """Start the process: it imports what it needs while the caller does other things."""
        self._supervisor = Supervisor(
            self._config, self._on_outputs, self._on_death, self._on_ready, self._fail_all
        )

    async def load(self, config: EngineConfig) -> EngineInfo:
        """Have the engine load its model. Raises what kept it from that."""
        self._queue_timeout_s = config.scheduler.queue_timeout_s
        return await self._supervisor.load(config)

    async def close(self) -> None:
        """Stop the process; requests that are left get `EngineDeadError`."""
        self._is_closing = True
        self._fail_all(EngineDeadError("the server is shutting down"))
        if self._waits_timer is not None:
            self._waits_timer.cancel()
        await self._supervisor.close()

    def kill(self) -> None:
        """End the process at once, for when there is no time to close."""
        self._is_closing = True
        self._engine.kill()

    @property
    def _engine(self) -> EngineHandle:
        return self._supervisor.engine

    @property
    def is_healthy(self) -> bool:
        """Whether an engine is there that runs requests now."""
        return not self._is_closing and self._engine.is_ready

    @property
    def is_lost(self) -> bool:
        """Whether there is no engine, and none will come."""
        return self._is_closing or self._supervisor.lost.done()

    async def wait_until_lost(self) -> EngineDeadError:
        """Why there is no engine any more, once it is known that none will come."""
        return await asyncio.shield(self._supervisor.lost)

    # -- requests

    def submit(self, requests: Sequence[EngineRequest]) -> DeltaStream:
        """Take requests in; their deltas come from the one stream returned.

        They wait here while the engine is started again.
        """
        if self.info is None or self.is_lost:
            raise EngineDeadError("the engine is not running; nothing can be run on this server")
        stream = DeltaStream(self, [request.request_id for request in requests])
        for request in requests:
            record = RequestRecord(request, submitted_at=time.monotonic())
            self.records[request.request_id] = record
            self._streams[request.request_id] = stream
            self._held[request.request_id] = None
            for observer in self.observers:
                observer.on_submit(record)
        self._dispatch()
        return stream

    def finish(self, request_ids: Sequence[str], reason: FinishReason) -> None:
        """End requests early. Ids of requests that are over already are ignored."""
        known = [request_id for request_id in request_ids if request_id in self.records]
        for request_id in known:
            self._retire(self.records[request_id], reason)
        self._recall(known)
        self._dispatch()

    def fail_all(self, error: Exception) -> None:
        """End every request now; whoever waits for one gets `error`."""
        request_ids = list(self.records)
        self._fail_all(error)
        self._recall(request_ids)

    def reset_prefix_cache(self) -> None:
        """Have the engine forget its cached prompts before it sees any request sent after this."""
        if self.is_healthy:  # else the next one begins without any
            self._engine.send(messages.RESET_PREFIX_CACHE)

    def replay(self, request_id: str) -> EngineRequest:
        """The request as it must be sent to go on after the tokens that have come for it."""
        record = self.records[request_id]
        seen = record.request.output_token_ids + record.token_ids
        return msgspec.structs.replace(
            record.request, output_token_ids=seen, has_run=record.has_run
        )

    def _dispatch(self) -> None:
        """Send what may be sent: everything, or one suspect alone. The others wait here."""
        if not self._held:
            return
        if not self.is_healthy:
            self._watch_waits()
            return
        if self._quarantine:
            if self._quarantine.on_trial is None:
                self._add(self._quarantine.next_trial())
            self._watch_waits()
            return
        held, self._held = self._held, {}
        for request_id in held:
            self._add(request_id)

    def _add(self, request_id: str) -> None:
        record = self.records[request_id]
        if record.is_interrupted:
            record.is_interrupted = False
            for observer in self.observers:
                observer.on_replay(record)
        body = messages.encode(self.replay(request_id))
        self._engine.send(messages.ADD, request_id.encode(), body)

    def _recall(self, request_ids: list[str]) -> None:
        """Have the engine end these requests, whether it has them or not."""
        if request_ids and self.is_healthy:
            self._engine.send(messages.FINISH, messages.encode(messages.Finish(request_ids)))

    def _watch_waits(self) -> None:
        """See to it that nobody waits here for too long; who is on an engine, that looks after."""
        if self._queue_timeout_s is not None and self._waits_timer is None:
            self._waits_timer = asyncio.get_running_loop().call_later(
                self._queue_timeout_s / LOOKS_PER_WAIT, self._end_long_waits
            )

    def _end_long_waits(self) -> None:
        assert self._queue_timeout_s is not None
        self._waits_timer = None
        latest = time.monotonic() - self._queue_timeout_s
        for record in [self.records[request_id] for request_id in self._held]:
            if record.is_new and record.request.arrival_time < latest:
                delta = EngineDelta(
                    request_id=record.request_id,
                    finish_reason=FinishReason.ERROR,
                    error=waited_too_long(self._queue_timeout_s),
                    can_retry=True,
                )
                self._on_delta(record, delta, time.monotonic())
        self._dispatch()

    # -- what comes back

    def _on_outputs(self, outputs: messages.Outputs) -> None:
        now = time.monotonic()
        for delta in outputs.deltas:
            record = self.records.get(delta.request_id)
            if record is not None:  # its client may have left meanwhile
                self._on_delta(record, delta, now)
        if outputs.stats is not None:
            self.stats = outputs.stats
            for observer in self.observers:
                observer.on_stats(outputs.stats)
        self._dispatch()

    def _on_delta(self, record: RequestRecord, delta: EngineDelta, now: float) -> None:
        if delta.finish_reason is FinishReason.ABORT:  # nobody left: a trial has ended well
            self._quarantine.end_trial()
            return
        if record.first_token_at is not None and record.num_deaths:
            # A replay may find its own prompt in the cache; what was said of it at first, counts.
            delta = msgspec.structs.replace(delta, num_cached_tokens=record.num_cached_tokens)
        record.num_cached_tokens = max(record.num_cached_tokens, delta.num_cached_tokens)
        if delta.token_ids:
            self._on_tokens(record, delta, now)
        stream = self._streams[delta.request_id]
        if delta.finish_reason is not None:
            self._retire(record, delta.finish_reason)
        stream.push(delta)

    def _on_tokens(self, record: RequestRecord, delta: EngineDelta, now: float) -> None:
        self._had_progress = True
        record.token_ids += delta.token_ids
        previous_at, record.last_token_at = record.last_token_at, now
        if record.first_token_at is None:
            record.first_token_at, record.prefill_s = now, delta.prefill_s
        for observer in self.observers:
            observer.on_tokens(record, len(delta.token_ids), previous_at)
        if record.request_id in self._quarantine:
            self._quarantine.clear(record.request_id)
            if delta.finish_reason is None:  # off the engine, for the next one to be alone there
                self._recall([record.request_id])

    def _retire(self, record: RequestRecord, reason: FinishReason) -> None:
        del self.records[record.request_id]
        del self._streams[record.request_id]
        self._held.pop(record.request_id, None)
        self._quarantine.forget(record.request_id)
        record.finished_at, record.finish_reason = time.monotonic(), reason
        for observer in self.observers:
            observer.on_finish(record)

    def _fail_all(self, error: Exception) -> None:
        for stream in set(self._streams.values()):
            stream.fail(error)
        for record in list(self.records.values()):
            self._retire(record, FinishReason.ERROR)

    # -- engines come and go

    def _on_ready(self, info: EngineInfo) -> None:
        is_restart, self.info, self._had_progress = self.info is not None, info, False
        for observer in self.observers:
            observer.on_ready(info)
        if is_restart:
            logger.info("The engine is back; %d requests go on", len(self.records))
            for observer in self.observers:
                observer.on_restart()
        self._dispatch()

    def _on_death(self, death: Death) -> Aftermath:
        """Find who may have killed the engine; everyone will be sent again."""
        had_progress, self._had_progress, self.stats = self._had_progress, False, None
        on_engine = [i for i in self.records if i not in self._held]
        on_engine += [i for i in self.records if i == self._quarantine.on_trial]
        executing = death.executing
        if not executing and not had_progress and self._supervisor.num_failures:
            # Twice in a row it died before a step, with these to run: one may be too much for it
            # before it gets that far.
            executing = frozenset(on_engine)
        suspects = [
            request_id
            for request_id, record in self.records.items()
            if request_id in executing and not record.has_tokens_since_death
        ]
        for request_id in on_engine:
            self.records[request_id].num_deaths += 1
            self.records[request_id].is_interrupted = True
            self.records[request_id].has_run |= request_id in death.executing
        for record in self.records.values():
            record.num_tokens_at_death = len(record.token_ids)
        self._held = dict.fromkeys(self.records)
        self._watch_waits()
        accused, convict, was_alone = self._quarantine.on_death(suspects)
        if accused:
            logger.warning("Requests that may have killed the engine: %s", ", ".join(accused))
            for observer in self.observers:
                observer.on_quarantine(len(accused))
        if convict is not None:
            self._convict(self.records[convict], death)
        return Aftermath(had_progress, is_explained=was_alone)

    def _convict(self, record: RequestRecord, death: Death) -> None:
        logger.error("Request %s fails: it keeps killing the engine", record.request_id)
        num_alone = self._config.max_request_crashes
        self._streams[record.request_id].fail(
            CrashFault(
                f"this request crashed the engine {record.num_deaths} times, {num_alone} of them "
                f"with no other request beside it (the last time: {death.how}); it is not tried "
                "again"
            )
        )
        self._retire(record, FinishReason.ERROR)
