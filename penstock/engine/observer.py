"""Observer: the interface through which metrics and logs follow requests and the engine."""

from __future__ import annotations

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
    num_deaths: int = 0  # engines that died while it was on them
    num_tokens_at_death: int = 0  # len(token_ids) when the last engine died
    is_interrupted: bool = False  # its engine died and it is on no other yet
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
    def is_new(self) -> bool:
        """Whether it has not run yet, as far as the client knows."""
        return not self.token_ids and not self.has_run and self.request.is_new

    @property
    def has_tokens_since_death(self) -> bool:
        return len(self.token_ids) > self.num_tokens_at_death


class Observer:
    """Called in the event loop for every request and token. Must be fast and must not raise."""

    def on_ready(self, info: EngineInfo) -> None:
        """An engine has loaded its model: the first one or a restarted one."""

    def on_restart(self) -> None:
        """An engine replaced one that died."""

    def on_replay(self, record: RequestRecord) -> None:
        """A request whose engine died is sent to another one."""

    def on_quarantine(self, num_requests: int) -> None:
        """`num_requests` requests may have killed the engine. Each will run alone."""

    def on_submit(self, record: RequestRecord) -> None:
        """A request was submitted."""

    def on_tokens(self, record: RequestRecord, num_tokens: int, previous_at: float | None) -> None:
        """New tokens arrived at `record.last_token_at`, the ones before them at `previous_at`."""

    def on_finish(self, record: RequestRecord) -> None:
        """A request ended: it finished, its client left, or the engine is gone."""

    def on_stats(self, stats: EngineStats) -> None:
        """The engine's state. Called a few times a second while there is work."""
