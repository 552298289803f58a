"""Dispatch: decides which of the ledger's requests are on the engine, across its restarts."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.config import EngineConfig, ServerConfig
from penstock.engine import messages
from penstock.engine.handle import Death, EngineHandle
from penstock.engine.ledger import Ledger
from penstock.engine.messages import EngineInfo, EngineStats
from penstock.engine.observer import RequestRecord
from penstock.engine.supervisor import Quarantine, RestartDecision, Supervisor
from penstock.protocol.calls import encode_args
from penstock.protocol.delta import EngineDelta, FinishReason
from penstock.protocol.errors import CrashFault, EngineDeadError, waited_too_long

logger = logging.getLogger(__name__)

LOOKS_PER_WAIT = 8  # checks per queue timeout for requests that wait here


class Dispatch:
    """Keeps an engine process running and sends it requests.

    When the engine dies, requests are replayed on the next one with the tokens they already have.
    Requests that may have killed it run alone first. The others wait here meanwhile.
    """

    def __init__(self, ledger: Ledger, config: ServerConfig) -> None:
        """Start the process. It imports its modules in the background."""
        self.stats: EngineStats | None = None  # the latest of the running engine
        self.info: EngineInfo | None = None  # of the latest engine
        self._ledger = ledger
        self._config = config
        self._quarantine = Quarantine(config.max_request_crashes)
        self._held: dict[str, None] = {}  # not on the engine, or there only on trial
        self._queue_timeout_s: float | None = None
        self._waits_timer: asyncio.TimerHandle | None = None
        self._had_progress = False  # tokens came from the current engine
        self._is_closing = False
        self._calls: dict[int, asyncio.Future[Any]] = {}  # not answered yet
        self._call_ids = itertools.count()
        self._supervisor = self._start(config)

    def _start(self, config: ServerConfig) -> Supervisor:
        return Supervisor(config, self._on_outputs, self._on_death, self._on_ready, self._on_loss)

    # -- the engine

    async def load(self, config: EngineConfig) -> EngineInfo:
        """Load the model in the engine. Raises the engine's error if that fails."""
        self._queue_timeout_s = config.scheduler.queue_timeout_s
        return await self._supervisor.load(config)

    async def close(self) -> None:
        """Stop the process."""
        self._is_closing = True
        if self._waits_timer is not None:
            self._waits_timer.cancel()
        self._fail_calls(EngineDeadError("the server is shutting down"))
        await self._supervisor.close()

    def kill(self) -> None:
        """Kill the process without a clean shutdown."""
        self._is_closing = True
        self._engine.kill()

    @property
    def _engine(self) -> EngineHandle:
        return self._supervisor.engine

    @property
    def is_healthy(self) -> bool:
        """Whether an engine is running and accepts requests now."""
        return not self._is_closing and self._engine.is_ready

    @property
    def is_lost(self) -> bool:
        """Whether the engine is gone and will not be restarted."""
        return self._is_closing or self._supervisor.lost.done()

    async def wait_until_lost(self) -> EngineDeadError:
        """Wait until the engine is gone for good. Returns the reason."""
        return await asyncio.shield(self._supervisor.lost)

    async def call(self, method: str, *args: Any) -> Any:
        """Run a method of `EngineCore`, in order with the requests sent before and after."""
        if not self.is_healthy:
            raise EngineDeadError("the engine is restarting; try again later")
        call_id = next(self._call_ids)
        answer = self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._engine.send(messages.CALL, str(call_id).encode(), method.encode(), *encode_args(args))
        return await answer

    def _fail_calls(self, error: Exception) -> None:
        calls, self._calls = self._calls, {}
        for answer in calls.values():
            if not answer.done():
                answer.set_exception(error)

    # -- requests

    def add(self, request_ids: Iterable[str]) -> None:
        """Run requests from the ledger. They wait here while the engine restarts."""
        self._held.update(dict.fromkeys(request_ids))
        self._send_held()

    def recall(self, request_ids: Sequence[str]) -> None:
        """Make the engine end these requests. It ignores ids that it does not have."""
        self._recall(request_ids)
        self._send_held()

    def _recall(self, request_ids: Sequence[str]) -> None:
        if request_ids and self.is_healthy:
            body = messages.encode(messages.Finish(list(request_ids)))
            self._engine.send(messages.FINISH, body)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._held.pop(request_id, None)
        self._quarantine.forget(request_id)

    def _send_held(self) -> None:
        """Send all held requests, or a single suspect if there are any. The others wait."""
        if not self._held:
            return
        if not self.is_healthy:
            self._watch_waits()
            return
        if self._quarantine:
            if self._quarantine.on_trial is None:
                self._send(self._quarantine.next_trial())
            self._watch_waits()
            return
        held, self._held = self._held, {}
        for request_id in held:
            self._send(request_id)

    def _send(self, request_id: str) -> None:
        record = self._ledger.records[request_id]
        if record.is_interrupted:
            record.is_interrupted = False
            for observer in self._ledger.observers:
                observer.on_replay(record)
        body = messages.encode(self._ledger.replay(request_id))
        self._engine.send(messages.ADD, request_id.encode(), body)

    def _watch_waits(self) -> None:
        """Start the queue timeout for requests that wait here. The engine checks its own."""
        if self._queue_timeout_s is not None and self._waits_timer is None:
            self._waits_timer = asyncio.get_running_loop().call_later(
                self._queue_timeout_s / LOOKS_PER_WAIT, self._end_long_waits
            )

    def _end_long_waits(self) -> None:
        assert self._queue_timeout_s is not None
        self._waits_timer = None
        latest = time.monotonic() - self._queue_timeout_s
        for record in [self._ledger.records[request_id] for request_id in self._held]:
            if record.is_new and record.request.arrival_time < latest:
                delta = EngineDelta(
                    request_id=record.request_id,
                    finish_reason=FinishReason.ERROR,
                    error=waited_too_long(self._queue_timeout_s),
                    can_retry=True,
                )
                self._ledger.take(record, delta, time.monotonic())
        self._send_held()

    # -- outputs

    def _on_outputs(self, outputs: messages.Outputs) -> None:
        now = time.monotonic()
        for delta in outputs.deltas:
            record = self._ledger.records.get(delta.request_id)
            if record is not None:  # its client may have left
                self._on_delta(record, delta, now)
        for result in outputs.calls:
            answer = self._calls.pop(result.call_id, None)
            if answer is not None and not answer.done():
                result.settle(answer)
        if outputs.stats is not None:
            self.stats = outputs.stats
            for observer in self._ledger.observers:
                observer.on_stats(outputs.stats)
        self._send_held()

    def _on_delta(self, record: RequestRecord, delta: EngineDelta, now: float) -> None:
        if delta.finish_reason is FinishReason.ABORT:  # recalled after a trial that went well
            self._quarantine.end_trial()
            return
        if delta.token_ids or delta.payload is not None:
            self._had_progress = True
            if record.request_id in self._quarantine:
                self._quarantine.clear(record.request_id)
                if delta.finish_reason is None:  # the next suspect must be alone on the engine
                    self._recall([record.request_id])
        self._ledger.take(record, delta, now)

    # -- restarts

    def _on_ready(self, info: EngineInfo) -> None:
        is_restart, self.info, self._had_progress = self.info is not None, info, False
        for observer in self._ledger.observers:
            observer.on_ready(info)
        if is_restart:
            logger.info("The engine has restarted; %d requests continue", len(self._ledger.records))
            for observer in self._ledger.observers:
                observer.on_restart()
        self._send_held()

    def _on_loss(self, error: EngineDeadError) -> None:
        self._fail_calls(error)
        self._ledger.fail_all(error)

    def _on_death(self, death: Death) -> RestartDecision:
        """Find the requests that may have killed the engine. All requests will be replayed."""
        self._fail_calls(EngineDeadError(f"the engine died ({death.how}); try again later"))
        records = self._ledger.records
        had_progress, self._had_progress, self.stats = self._had_progress, False, None
        on_engine = [i for i in records if i not in self._held]
        on_engine += [i for i in records if i == self._quarantine.on_trial]
        executing = death.executing
        if not executing and not had_progress and self._supervisor.num_failures:
            # The engine died twice in a row before a step. One of its requests may kill it even
            # before it runs.
            executing = frozenset(on_engine)
        suspects = [
            request_id
            for request_id, record in records.items()
            if request_id in executing and not record.has_tokens_since_death
        ]
        for request_id in on_engine:
            records[request_id].num_deaths += 1
            records[request_id].is_interrupted = True
            records[request_id].has_run |= request_id in death.executing
        for record in records.values():
            record.num_tokens_at_death = len(record.token_ids)
        self._held = dict.fromkeys(records)
        self._watch_waits()
        accused, convict, was_alone = self._quarantine.on_death(suspects)
        if accused:
            logger.warning("Requests that may have crashed the engine: %s", ", ".join(accused))
            for observer in self._ledger.observers:
                observer.on_quarantine(len(accused))
        if convict is not None:
            self._convict(records[convict], death)
        return RestartDecision(had_progress, is_explained=was_alone)

    def _convict(self, record: RequestRecord, death: Death) -> None:
        logger.error("Request %s failed: it has crashed the engine repeatedly", record.request_id)
        num_alone = self._config.max_request_crashes
        error = CrashFault(
            f"this request crashed the engine {record.num_deaths} times, {num_alone} of them "
            f"with no other request beside it (the last time: {death.how}); it is not tried again"
        )
        self._ledger.fail(record, error)
