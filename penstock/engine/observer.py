"""Observer: the interface through which metrics and logs follow requests and the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.engine.messages import EngineInfo, EngineStats
from penstock.protocol.delta import FinishReason
from penstock.protocol.request import EngineRequest


@dataclass
class RequestRecord:
    """One engine request from submission to end. Times are from `time.monotonic`."""

    request: EngineRequest
    submitted_at: float
    # All tokens received from engines. A replay continues after them.
    token_ids: list[int] = field(default_factory=list)
    session: str | None = None  # requests of one session should run on one replica
    version: int = 0  # of the model on its replica
    replica: int | None = None  # the one that it was given to; None: it waits for one
    num_engines: int = 0  # to which it was sent, also if twice to the same
    has_started: bool = False  # it got tokens from the last of them
    num_deaths: int = 0  # engines that died while it was on them
    num_early_deaths: int = 0  # of those, engines that died before any step
    num_tokens_at_death: int = 0  # len(token_ids) when the last of them died
    is_interrupted: bool = False  # its engine died or gave it up, and it is on no other yet
    has_run: bool = False  # it was in a step of an engine that died
    num_cached_tokens: int = 0
    prefill_s: float = 0.0  # from its first step to its first token
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished_at: float | None = None
    finish_reason: FinishReason | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def family(self) -> str:
        """The id that the `n` completions of one client's request share."""
        request_id = self.request.request_id
        is_one_of_many = not self.request.pools and self.request.sampling.n > 1
        return request_id.rpartition("#")[0] if is_one_of_many else request_id

    @property
    def is_new(self) -> bool:
        """Whether it has not run yet, as far as the client knows."""
        return not self.token_ids and not self.has_run and self.request.is_new

    @property
    def has_tokens_since_death(self) -> bool:
        return len(self.token_ids) > self.num_tokens_at_death


class Observer:
    """Called in the event loop for every request and token. Must be fast and must not raise.

    `replica` is the index of the replica that an engine belongs to.
    """

    def on_ready(self, replica: int, info: EngineInfo) -> None:
        """An engine has loaded its model: the first one or a restarted one."""

    def on_death(self, replica: int) -> None:
        """An engine has died. `on_restart` or `on_gone` follows."""

    def on_restart(self, replica: int) -> None:
        """An engine replaced one that died."""

    def on_gone(self, replica: int) -> None:
        """A replica is gone for good: it kept dying, or it was removed."""

    def on_replay(self, record: RequestRecord) -> None:
        """A request is sent to another engine: its own died, or gave it up."""

    def on_quarantine(self, num_requests: int) -> None:
        """`num_requests` requests may have killed the engine. Each will run alone."""

    def on_submit(self, record: RequestRecord) -> None:
        """A request was submitted."""

    def on_tokens(self, record: RequestRecord, num_tokens: int, previous_at: float | None) -> None:
        """New tokens arrived at `record.last_token_at`, the ones before them at `previous_at`."""

    def on_finish(self, record: RequestRecord) -> None:
        """A request ended: it finished, its client left, or the engine is gone."""

    def on_search(self, records: Sequence[RequestRecord]) -> None:
        """Beam searches ended. `records` are the completions that clients asked for.

        Each step was a request of its own before, with `is_search_step`.
        """

    def on_stats(self, replica: int, stats: EngineStats) -> None:
        """An engine's state. Called a few times a second while there is work."""
