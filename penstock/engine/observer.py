"""Who wants to know how requests fare: metrics, logs. The engine's client tells them."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.engine.messages import EngineInfo, EngineStats
from penstock.protocol.delta import FinishReason
from penstock.protocol.request import EngineRequest


@dataclass
class RequestRecord:
    """One engine request from its submission to its end. Times are of `time.monotonic`."""

    request: EngineRequest
    submitted_at: float
    # Every token that has come from the engine: with them the request can be run again.
    token_ids: list[int] = field(default_factory=list)
    num_deaths: int = 0  # of engines that it was on
    num_tokens_at_death: int = 0  # how many there were when the last engine died
    is_interrupted: bool = False  # its engine died, and no other has it yet
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
        """Whether it has yet to have its first turn, as far as is known here."""
        return not self.token_ids and not self.has_run and self.request.is_new

    @property
    def has_tokens_since_death(self) -> bool:
        return len(self.token_ids) > self.num_tokens_at_death


class Observer:
    """Called in the event loop, for every request and every token: be quick, never raise."""

    def on_ready(self, info: EngineInfo) -> None:
        """An engine has loaded its model: the first, or one in place of one that died."""

    def on_restart(self) -> None:
        """Another engine is there in place of one that died."""

    def on_replay(self, record: RequestRecord) -> None:
        """A request whose engine died is on its way to another."""

    def on_quarantine(self, num_requests: int) -> None:
        """So many requests are suspected of having killed the engine: they will run alone."""

    def on_submit(self, record: RequestRecord) -> None:
        """A request is on its way to the engine."""

    def on_tokens(self, record: RequestRecord, num_tokens: int, previous_at: float | None) -> None:
        """New tokens came at `record.last_token_at`; those before them at `previous_at`."""

    def on_finish(self, record: RequestRecord) -> None:
        """A request ended: by itself, or because its client left or the engine is lost."""

    def on_stats(self, stats: EngineStats) -> None:
        """The engine's state, a few times a second while there is work."""
