"""Dispatch: runs requests on one replica: an engine and its successors."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from penstock.config import EngineConfig, ServerConfig
from penstock.engine import messages
from penstock.engine.handle import Death, EngineHandle
from penstock.engine.ledger import Ledger
from penstock.engine.messages import EngineInfo, EngineStats
from penstock.engine.observer import RequestRecord
from penstock.engine.supervisor import Quarantine, RestartDecision, Supervisor
from penstock.protocol.calls import encode_args
from penstock.protocol.delta import EngineDelta, FinishReason
from penstock.protocol.errors import CrashFault, EngineDeadError
from penstock.protocol.prefix import CacheUpdate

logger = logging.getLogger(__name__)


class DispatchOwner(Protocol):
    """Decides on which replica a request runs. `replica` is the index of the one that reports."""

    def release(self, replica: int, request_ids: Sequence[str]) -> None:
        """These requests are on no engine any more. They may run anywhere."""

    def on_ready(self, replica: int, info: EngineInfo) -> None:
        """An engine has loaded the model. Its cache is empty."""

    def on_open(self, replica: int) -> None:
        """The replica takes requests now."""

    def on_death(self, replica: int) -> None:
        """The engine has died. Its requests are released next."""

    def on_cache(self, replica: int, update: CacheUpdate) -> None:
        """The engine's prefix cache has changed."""

    def on_start(self, request_id: str) -> None:
        """A request got its first token on its engine."""

    def on_lost(self, replica: int, suspects: Sequence[str], error: EngineDeadError) -> None:
        """The replica is gone for good. Its suspects have yet to run alone."""


class Dispatch:
    """Keeps an engine process running and sends it requests.

    If the engine dies, those that may have killed it stay here. Each of them runs alone on the next
    engine until it gets a token. All others are released to the owner at once. So are requests that
    have to leave for another reason, as soon as the engine has let go of them.
    """

    def __init__(
        self,
        ledger: Ledger,
        config: ServerConfig,
        owner: DispatchOwner,
        index: int = 0,
        is_only: bool = True,
    ) -> None:
        """Start the process. It imports its modules in the background.

        `is_only`: there is no other replica. Then a spare stands by, and the logs use no numbers.
        """
        self.index = index
        self.stats: EngineStats | None = None  # the latest of the running engine
        self.info: EngineInfo | None = None  # of the latest engine
        self.running: dict[str, None] = {}  # requests on the engine
        self._ledger = ledger
        self._config = config
        self._owner = owner
        # An engine that is not restarted can be lost to a suspect only once.
        self._quarantine = Quarantine(config.max_request_crashes if config.restart_engine else 1)
        self._had_progress = False  # tokens came from the current engine
        self._is_closing = False
        self._calls: dict[int, asyncio.Future[Any]] = {}  # not answered yet
        self._call_ids = itertools.count()
        self._name = "engine" if is_only else f"engine {index}"
        self._supervisor = self._start(config, keep_spare=is_only and config.spare_engine)

    def _start(self, config: ServerConfig, keep_spare: bool) -> Supervisor:
        return Supervisor(
            config, self._on_outputs, self._on_death, self._on_ready, self._on_loss,
            name=self._name, keep_spare=keep_spare,
        )  # fmt: skip

    # -- the engine

    async def load(self, config: EngineConfig) -> EngineInfo:
        """Load the model in the engine. Raises the engine's error if that fails."""
        return await self._supervisor.load(config)

    def limit_model_len(self, max_model_len: int) -> None:
        """Give engines that are started from now on this `max_model_len`."""
        self._supervisor.limit_model_len(max_model_len)

    async def close(self) -> None:
        """Stop the process."""
        self._is_closing = True
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
        """Whether an engine is running."""
        return not self._is_closing and self._engine.is_ready

    @property
    def is_open(self) -> bool:
        """Whether an engine is running and takes any request."""
        return not self._quarantine and self.is_healthy

    @property
    def is_lost(self) -> bool:
        """Whether the engine is gone and will not be restarted."""
        return self._is_closing or self._supervisor.lost.done()

    @property
    def suspects(self) -> list[str]:
        """Requests that have to run alone here."""
        return list(self._quarantine)

    @property
    def waiting(self) -> list[str]:
        """Suspects that are not on the engine now."""
        return [request_id for request_id in self._quarantine if request_id not in self.running]

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

    def add(self, request_id: str) -> None:
        """Run a request from the ledger. The replica must be open."""
        assert self.is_open
        self._send(request_id)

    def recall(self, request_ids: Sequence[str]) -> None:
        """Make the engine end these requests. It ignores ids that it does not have."""
        if request_ids and self.is_healthy:
            body = messages.encode(messages.Finish(list(request_ids)))
            self._engine.send(messages.FINISH, body)
        self._go_on()  # the last suspect may be gone

    def vacate(self, request_ids: Iterable[str] | None = None) -> None:
        """Release these requests, or all on the engine. Tokens under way still arrive here."""
        leaving = list(self.running if request_ids is None else request_ids)
        for request_id in leaving:
            self._ledger.records[request_id].is_interrupted = True
        self.recall(leaving)

    def accuse(self, request_ids: Iterable[str]) -> None:
        """Let each of these run alone. All requests that are on the engine leave first."""
        self._quarantine.accuse(request_ids)
        self.vacate()

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self.running.pop(request_id, None)
        self._quarantine.forget(request_id)

    def _go_on(self) -> None:
        """Start the next trial once the engine is empty. Open the replica after the last one."""
        if not self.is_healthy or self._quarantine.on_trial is not None:
            return
        if not self._quarantine:
            self._owner.on_open(self.index)
        elif not self.running:
            self._send(self._quarantine.next_trial())

    def _send(self, request_id: str) -> None:
        record = self._ledger.records[request_id]
        if record.is_interrupted:
            record.is_interrupted = False
            for observer in self._ledger.observers:
                observer.on_replay(record)
        record.num_engines += 1
        record.has_started = False
        self.running[request_id] = None
        body = messages.encode(self._ledger.replay(request_id))
        self._engine.send(messages.ADD, request_id.encode(), body)

    # -- outputs

    def _on_outputs(self, outputs: messages.Outputs) -> None:
        now, had_suspects = time.monotonic(), bool(self._quarantine)
        for delta in outputs.deltas:
            if delta.request_id in self.running:  # its client may have left
                record = self._ledger.records[delta.request_id]
                self._on_delta(record, delta, now, had_suspects)
        for result in outputs.calls:
            answer = self._calls.pop(result.call_id, None)
            if answer is not None and not answer.done():
                result.settle(answer)
        if outputs.cache is not None:
            self._owner.on_cache(self.index, outputs.cache)
        if outputs.stats is not None:
            self.stats = outputs.stats
            for observer in self._ledger.observers:
                observer.on_stats(self.index, outputs.stats)
        if had_suspects:
            self._go_on()

    def _on_delta(
        self, record: RequestRecord, delta: EngineDelta, now: float, has_suspects: bool
    ) -> None:
        if delta.finish_reason is FinishReason.ABORT:  # it was to leave, and it has
            del self.running[record.request_id]
            self._quarantine.end_trial(record.request_id)
            if record.request_id not in self._quarantine:
                self._owner.release(self.index, [record.request_id])
            return
        if delta.token_ids or delta.payload is not None:
            self._had_progress = True
            if not record.has_started:
                record.has_started = True
                self._owner.on_start(record.request_id)
            if has_suspects and record.request_id in self._quarantine:
                self._quarantine.clear(record.request_id)
                if delta.finish_reason is None:  # the next suspect must be alone on the engine
                    self.recall([record.request_id])
        self._ledger.take(record, delta, now)

    # -- restarts

    def _on_ready(self, info: EngineInfo) -> None:
        is_restart, self.info, self._had_progress = self.info is not None, info, False
        self._owner.on_ready(self.index, info)
        for observer in self._ledger.observers:
            observer.on_ready(self.index, info)
        if is_restart:
            num_left = len(self._ledger.records)
            logger.info("The %s has restarted; %d requests continue", self._name, num_left)
            for observer in self._ledger.observers:
                observer.on_restart(self.index)
        self._go_on()

    def _on_loss(self, error: EngineDeadError) -> None:
        self._fail_calls(error)
        suspects = self.suspects
        for request_id in suspects:
            self._quarantine.forget(request_id)
        self._owner.on_lost(self.index, suspects, error)

    def _on_death(self, death: Death) -> RestartDecision:
        """Find the requests that may have killed the engine, and release the others."""
        self._fail_calls(EngineDeadError(f"the engine died ({death.how}); try again later"))
        self._owner.on_death(self.index)
        for observer in self._ledger.observers:
            observer.on_death(self.index)
        had_progress, self._had_progress, self.stats = self._had_progress, False, None
        running, self.running = self.running, {}
        records = [self._ledger.records[request_id] for request_id in running]
        is_early = not death.executing and not had_progress
        suspects = [record.request_id for record in records if is_suspect(record, death, is_early)]
        for record in records:
            record.num_deaths += 1
            record.num_early_deaths += is_early
            record.is_interrupted = True
            record.has_run |= record.request_id in death.executing
            record.num_tokens_at_death = len(record.token_ids)
        accused, convict, was_alone = self._quarantine.on_death(suspects)
        if accused:
            logger.warning(
                "Requests that may have crashed the %s: %s", self._name, ", ".join(accused)
            )
            for observer in self._ledger.observers:
                observer.on_quarantine(len(accused))
        if convict is not None:
            self._convict(self._ledger.records[convict], death)
            del running[convict]
        self._owner.release(self.index, [i for i in running if i not in self._quarantine])
        return RestartDecision(had_progress, is_explained=was_alone)

    def _convict(self, record: RequestRecord, death: Death) -> None:
        logger.error("Request %s failed: it has crashed the engine repeatedly", record.request_id)
        num_alone = self._quarantine.max_crashes
        error = CrashFault(
            f"this request crashed the engine {record.num_deaths} times, {num_alone} of them "
            f"with no other request beside it (the last time: {death.how}); it is not tried again"
        )
        self._ledger.fail(record, error)


def is_suspect(record: RequestRecord, death: Death, is_early: bool) -> bool:
    """Whether a request may have killed the engine that it was on.

    It was in the fatal step and got no token since the last death. Or the engine died before any
    step, for the second time with this request: it may kill engines even before it runs.
    """
    if is_early:
        return record.num_early_deaths > 0
    return record.request_id in death.executing and not record.has_tokens_since_death
