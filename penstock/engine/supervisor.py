"""Supervisor: keeps an engine running. When it dies, starts another one.

`Quarantine` decides which requests must run alone because they may have killed the engine.
`RestartPolicy` decides how long to wait before a restart and when to give up.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from penstock.config import EngineConfig, ServerConfig
from penstock.engine.handle import Death, EngineHandle, HangWatch
from penstock.engine.messages import EngineInfo, Outputs
from penstock.protocol.errors import ConfigError, EngineDeadError, ModelError, PenstockError

logger = logging.getLogger(__name__)

QUICK_DEATH_S = 10.0  # a death within this time after a start may count as a failure
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
# How long to wait before starting a spare for the first engine, or after a spare died. A restarted
# engine gets a spare at once: deaths often come in series.
SPARE_DELAY_S = 10.0


@dataclass(frozen=True)
class RestartDecision:
    """What a death means for the restart."""

    had_progress: bool  # the engine produced tokens since its start
    is_explained: bool  # one request ran alone and caused it; the engine itself may be fine


class RestartPolicy:
    """Decides how long to wait before a restart, or None to give up.

    A death counts as a failure only if it comes soon after a start and without a token. Only
    failures in a row count: an engine that makes progress is always restarted.
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
    """Requests that may have killed an engine. Each runs alone until it gets a token.

    A request is convicted after it killed the engine `max_crashes` times in a row while it ran
    alone. A request that was merely present when something else killed the engine is cleared,
    unless that keeps happening while it runs alone.
    """

    def __init__(self, max_crashes: int) -> None:
        self.max_crashes = max_crashes
        self.on_trial: str | None = None  # runs alone now
        self._num_crashes: dict[str, int] = {}  # crashes alone by suspect, in order of trials

    def __bool__(self) -> bool:
        """Whether a suspect runs alone or waits to do so."""
        return bool(self._num_crashes) or self.on_trial is not None

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._num_crashes

    def __iter__(self) -> Iterator[str]:
        return iter(self._num_crashes)

    def accuse(self, request_ids: Iterable[str]) -> None:
        """Add suspects. A suspect keeps its record."""
        for request_id in request_ids:
            self._num_crashes.setdefault(request_id, 0)

    def next_trial(self) -> str:
        """Start the next trial. Returns the id of the request that runs alone."""
        assert self.on_trial is None
        self.on_trial = next(iter(self._num_crashes))
        return self.on_trial

    def clear(self, request_id: str) -> None:
        """Clear a request that got a token. A trial ends only when it is off the engine."""
        self._num_crashes.pop(request_id, None)

    def end_trial(self, request_id: str) -> None:
        """A request is off the engine. If it was on trial, the trial is over."""
        if request_id == self.on_trial:
            self.on_trial = None

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self.clear(request_id)
        self.end_trial(request_id)

    def on_death(self, suspects: Iterable[str]) -> tuple[list[str], str | None, bool]:
        """Record the requests of the fatal step that got no token since the last death.

        Returns the new suspects, the convicted request if any, and whether a suspect ran alone.
        """
        accused, on_trial = list(suspects), self.on_trial
        self.on_trial = None
        if on_trial is not None and on_trial in accused and on_trial in self._num_crashes:
            self._num_crashes[on_trial] += 1
            if self._num_crashes[on_trial] < self.max_crashes:
                return [], None, True
            del self._num_crashes[on_trial]
            return [], on_trial, True
        new = [request_id for request_id in accused if request_id not in self._num_crashes]
        self.accuse(new)
        return new, None, False


class Supervisor:
    """Runs one engine at a time.

    `on_ready` is called when an engine is ready, before its first outputs go to `on_outputs`.
    `on_death` decides what a death means. `on_loss` is called when it will not be restarted. Log
    lines use `name`.

    With `keep_spare`, a spare process stands by while an engine runs. It has imported all modules
    and waits for a model to load. Importing takes longer than loading a small model.
    """

    def __init__(
        self,
        config: ServerConfig,
        on_outputs: Callable[[Outputs], None],
        on_death: Callable[[Death], RestartDecision],
        on_ready: Callable[[EngineInfo], None],
        on_loss: Callable[[EngineDeadError], None],
        name: str = "engine",
        keep_spare: bool = False,
    ) -> None:
        self.lost: asyncio.Future[EngineDeadError] = asyncio.get_running_loop().create_future()
        self._config = config
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._on_ready = on_ready
        self._on_loss = on_loss
        self._name = name
        self._keeps_spare = keep_spare and config.restart_engine
        self._engine_config: EngineConfig | None = None  # of engines that are started from now on
        self._policy = RestartPolicy(config.restart_engine, config.max_engine_failures)
        self._running: asyncio.Task[None] | None = None
        self._spare: EngineHandle | None = None
        self.engine = self._start_engine()

    def _start_engine(self) -> EngineHandle:
        watch = HangWatch(self._config.engine_heartbeat_timeout_s, self._config.step_timeout_s)
        return EngineHandle(self._on_ready, self._on_outputs, watch)

    async def load(self, config: EngineConfig) -> EngineInfo:
        """Load the model in the first engine and supervise it from then on.

        Raises the engine's error if it fails: an engine that never ran is not restarted.
        """
        info = await self.engine.load(config)
        if info is None:
            raise _start_error(await self.engine.died())
        self._engine_config = config
        self.limit_model_len(info.limits.max_model_len)  # a restarted engine must serve the same
        self._running = asyncio.ensure_future(self._run())
        self._running.add_done_callback(self._on_end)
        return info

    def limit_model_len(self, max_model_len: int) -> None:
        """Give engines that are started from now on this `max_model_len`."""
        config = self._engine_config
        assert config is not None, "`load` comes first"
        model = dataclasses.replace(config.model, max_model_len=max_model_len)
        self._engine_config = dataclasses.replace(config, model=model)

    async def _run(self) -> None:
        death = await self._death_of_engine(SPARE_DELAY_S)
        while True:
            logger.error("The %s died (%s)", self._name, death)
            delay_s = self._policy.delay_after(death, self._on_death(death))
            if delay_s is None:
                self._give_up(death)
                return
            if delay_s:
                logger.warning("Restarting the %s in %g s", self._name, delay_s)
                await asyncio.sleep(delay_s)
            assert self._engine_config is not None
            death = await self._live(self._engine_config)

    async def _live(self, config: EngineConfig) -> Death:
        """Start another engine and wait until it dies. Returns how."""
        try:
            self.engine = self._take_spare() or self._start_engine()
        except OSError as error:  # no process, memory or file descriptor left
            return Death(f"it cannot be started: {error}", None, frozenset(), None)
        await self.engine.load(config)
        return await self._death_of_engine(0.0)

    async def _death_of_engine(self, spare_delay_s: float) -> Death:
        """Wait until the engine dies. Keep a spare meanwhile. Returns how the engine died."""
        if not self._keeps_spare:
            return await self.engine.died()
        keeping = asyncio.ensure_future(self._keep_spare(spare_delay_s))
        try:
            return await self.engine.died()
        finally:
            keeping.cancel()
            await asyncio.wait({keeping})

    async def _keep_spare(self, delay_s: float) -> None:
        """Start a spare after a delay, and another one when it dies."""
        while True:
            await asyncio.sleep(delay_s)
            delay_s = SPARE_DELAY_S
            try:
                self._spare = self._start_engine()
            except OSError as error:
                logger.warning("Cannot start a spare engine: %s", error)
                continue
            death = await self._spare.died()
            logger.warning("The spare engine died (%s); starting another in %g s", death, delay_s)

    def _take_spare(self) -> EngineHandle | None:
        spare, self._spare = self._spare, None
        return None if spare is None or spare.death.done() else spare

    def _give_up(self, death: Death) -> None:
        num_failures = self._policy.num_failures
        often = f"{num_failures} times in a row soon after its start" if num_failures else "once"
        error = EngineDeadError(
            f"the {self._name} died {often}, the last time by {death}; it is not restarted"
        )
        logger.critical("Giving up: %s", error)
        self._lose(error)

    def _on_end(self, running: asyncio.Task[None]) -> None:
        """Give up if the supervisor itself failed: an unsupervised engine is worse than none."""
        if not running.cancelled() and (error := running.exception()) is not None:
            logger.critical("The supervisor failed", exc_info=error)
            self._lose(EngineDeadError(f"the engine's supervisor failed: {error!r}"))

    def _lose(self, error: EngineDeadError) -> None:
        self.lost.set_result(error)
        self._on_loss(error)

    async def close(self) -> None:
        """Stop the supervision and the engine."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        if self._spare is not None:
            self._spare.kill()
            await self._spare.died()
        await self.engine.close()


def _start_error(death: Death) -> PenstockError:
    """Return why the first engine did not start, as an exception."""
    for error_class in (ConfigError, ModelError):
        if death.failure is not None and death.failure.kind == error_class.__name__:
            return error_class(death.failure.error)
    return EngineDeadError(f"the engine died ({death})")
