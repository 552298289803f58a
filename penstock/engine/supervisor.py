"""Supervisor: keeps an engine running. When one dies, another is started in its place.

What becomes of requests is decided here too, apart from any process: `Quarantine` says which of
them are to be run alone because they may have killed the engine, `RestartPolicy` when to wait and
when to give up.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.config import EngineConfig, ServerConfig
from penstock.engine.handle import Death, EngineHandle, HangWatch
from penstock.engine.messages import EngineInfo, Outputs
from penstock.protocol.errors import ConfigError, EngineDeadError, ModelError, PenstockError

logger = logging.getLogger(__name__)

QUICK_DEATH_S = 10.0  # after a start
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
# A spare engine is made when the first has got going, and when the one before it is dead so long.
# An engine that follows a death has a spare of its own at once: deaths seldom come alone.
SPARE_DELAY_S = 10.0


@dataclass(frozen=True)
class RestartDecision:
    """What a death meant, as far as restarts are concerned."""

    had_progress: bool  # tokens came since the engine was started
    is_explained: bool  # by one request that ran alone: the engine itself may be sound


class RestartPolicy:
    """How long to wait before an engine is started again; None: no more.

    Only deaths soon after a start that brought no token count, and only as many in a row: an
    engine that gets something done is always worth another start.
    """

    def __init__(self, restart_engine: bool, max_failures: int) -> None:
        self._restart_engine = restart_engine
        self._max_failures = max_failures
        self.num_failures = 0  # in a row

    def delay_after(self, death: Death, decision: RestartDecision) -> float | None:
        if not self._restart_engine:
            return None
        if decision.is_explained:
            return 0.0
        is_quick = death.uptime_s is None or death.uptime_s < QUICK_DEATH_S
        if decision.had_progress or not is_quick:
            self.num_failures = 0
            return 0.0
        self.num_failures += 1
        if self.num_failures > self._max_failures:
            return None
        return float(min(FIRST_DELAY_S * 2 ** (self.num_failures - 1), LONGEST_DELAY_S))


class Quarantine:
    """Requests that may have killed an engine: each is to be run alone until it gets a token.

    One that kills the engine alone, `max_crashes` times in a row, is convicted. So a request that
    was merely there when something else ended the engine is not, unless that happens again and
    again to it alone.
    """

    def __init__(self, max_crashes: int) -> None:
        self.on_trial: str | None = None  # runs alone now
        self._max_crashes = max_crashes
        self._num_crashes: dict[str, int] = {}  # of each suspect, alone; in order of their trials

    def __bool__(self) -> bool:
        """Whether someone is to be run alone, or is being so."""
        return bool(self._num_crashes) or self.on_trial is not None

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._num_crashes

    def next_trial(self) -> str:
        """Who is to be run alone now."""
        assert self.on_trial is None
        self.on_trial = next(iter(self._num_crashes))
        return self.on_trial

    def clear(self, request_id: str) -> None:
        """It got a token. If it is on trial, that ends when it is off the engine again."""
        self._num_crashes.pop(request_id, None)

    def end_trial(self) -> None:
        self.on_trial = None

    def forget(self, request_id: str) -> None:
        """It has ended."""
        self.clear(request_id)
        if request_id == self.on_trial:
            self.on_trial = None

    def on_death(self, suspects: Iterable[str]) -> tuple[list[str], str | None, bool]:
        """Take in who was in the fatal step without having got a token since the last death.

        Returns those newly under suspicion, who is convicted, and whether one was alone.
        """
        accused, on_trial = list(suspects), self.on_trial
        self.on_trial = None
        if on_trial is not None and on_trial in accused and on_trial in self._num_crashes:
            self._num_crashes[on_trial] += 1
            if self._num_crashes[on_trial] < self._max_crashes:
                return [], None, True
            del self._num_crashes[on_trial]
            return [], on_trial, True
        new = [request_id for request_id in accused if request_id not in self._num_crashes]
        self._num_crashes.update(dict.fromkeys(new, 0))
        return new, None, False


class Supervisor:
    """Starts engines, one after the other. `on_outputs` gets what the current one sends,
    `on_death` is asked what a death meant, `on_ready` is told that another engine is there.

    Beside an engine that runs there is a spare: a process that has imported all it needs and waits
    to be told which model to load. To import takes longer than to load a small model.
    """

    def __init__(
        self,
        config: ServerConfig,
        on_outputs: Callable[[Outputs], None],
        on_death: Callable[[Death], RestartDecision],
        on_ready: Callable[[EngineInfo], None],
        on_loss: Callable[[EngineDeadError], None],
    ) -> None:
        self.lost: asyncio.Future[EngineDeadError] = asyncio.get_running_loop().create_future()
        self._config = config
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._on_ready = on_ready
        self._on_loss = on_loss
        self._policy = RestartPolicy(config.restart_engine, config.max_engine_failures)
        self._running: asyncio.Task[None] | None = None
        self._spare: EngineHandle | None = None
        self.engine = self._start_engine()

    def _start_engine(self) -> EngineHandle:
        watch = HangWatch(self._config.engine_heartbeat_timeout_s, self._config.step_timeout_s)
        return EngineHandle(self._on_outputs, watch)

    @property
    def num_failures(self) -> int:
        """Deaths in a row, up to the last one, that brought nothing and that nobody explains."""
        return self._policy.num_failures

    async def load(self, config: EngineConfig) -> EngineInfo:
        """Have the first engine load its model, and supervise it from then on.

        Raises what kept it from that: an engine that never ran is not started again.
        """
        info = await self.engine.load(config)
        if info is None:
            raise _start_error(await self.engine.died())
        # What the first could serve, the others must.
        model = dataclasses.replace(config.model, max_model_len=info.limits.max_model_len)
        config = dataclasses.replace(config, model=model)
        self._on_ready(info)
        self._running = asyncio.ensure_future(self._run(config))
        self._running.add_done_callback(self._on_end)
        return info

    async def _run(self, config: EngineConfig) -> None:
        death = await self._death_of_engine(SPARE_DELAY_S)
        while True:
            logger.error("The engine died (%s)", death)
            delay_s = self._policy.delay_after(death, self._on_death(death))
            if delay_s is None:
                self._give_up(death)
                return
            if delay_s:
                logger.warning("The engine is started again in %g s", delay_s)
                await asyncio.sleep(delay_s)
            death = await self._live(config)

    async def _live(self, config: EngineConfig) -> Death:
        """Start another engine; how that one ends."""
        try:
            self.engine = self._take_spare() or self._start_engine()
        except OSError as error:  # no process, no memory, no file to be had
            return Death(f"it cannot be started: {error}", None, frozenset(), None)
        info = await self.engine.load(config)
        if info is not None:
            self._on_ready(info)
        return await self._death_of_engine(0.0)

    async def _death_of_engine(self, spare_delay_s: float) -> Death:
        """How the engine ended, once it has. While it lives, there is a spare."""
        if not (self._config.restart_engine and self._config.spare_engine):
            return await self.engine.died()
        keeping = asyncio.ensure_future(self._keep_spare(spare_delay_s))
        try:
            return await self.engine.died()
        finally:
            keeping.cancel()
            await asyncio.wait({keeping})

    async def _keep_spare(self, delay_s: float) -> None:
        """Make a spare after a while, and another one when that dies."""
        while True:
            await asyncio.sleep(delay_s)
            delay_s = SPARE_DELAY_S
            try:
                self._spare = self._start_engine()
            except OSError as error:
                logger.warning("There is no spare engine, it cannot be started: %s", error)
                continue
            death = await self._spare.died()
            logger.warning("The spare engine died (%s): another is made in %g s", death, delay_s)

    def _take_spare(self) -> EngineHandle | None:
        spare, self._spare = self._spare, None
        return None if spare is None or spare.death.done() else spare

    def _give_up(self, death: Death) -> None:
        num_failures = self._policy.num_failures
        often = f"{num_failures} times in a row soon after its start" if num_failures else "once"
        error = EngineDeadError(
            f"the engine died {often}, the last time by {death}: it is not started again"
        )
        logger.critical("Giving up: %s", error)
        self._lose(error)

    def _on_end(self, running: asyncio.Task[None]) -> None:
        """An unsupervised engine is worse than none: whatever ended the supervision ends it all."""
        if not running.cancelled() and (error := running.exception()) is not None:
            logger.critical("The supervisor failed", exc_info=error)
            self._lose(EngineDeadError(f"the engine's supervisor failed: {error!r}"))

    def _lose(self, error: EngineDeadError) -> None:
        self.lost.set_result(error)
        self._on_loss(error)

    async def close(self) -> None:
        """Stop supervising, and the engine with it."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        if self._spare is not None:
            self._spare.kill()
            await self._spare.died()
        await self.engine.close()


def _start_error(death: Death) -> PenstockError:
    """Why the first engine did not start, as it would have been raised here."""
    for error_class in (ConfigError, ModelError):
        if death.failure is not None and death.failure.kind == error_class.__name__:
            return error_class(death.failure.error)
    return EngineDeadError(f"the engine died ({death})")
