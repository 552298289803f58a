"""RequestState: what the scheduler knows about a request, and how a step changes it."""

from __future__ import annotations

import enum
import time
from functools import lru_cache

from penstock.protocol.delta import FinishReason
from penstock.protocol.request import EngineRequest
from penstock.protocol.step import RequestResult, ScheduledRequest

MAX_SHARED_IDS = 64  # stop tokens: more are a request's own, since clients may send millions


class RequestStatus(enum.Enum):
    WAITING = "waiting"  # for its gates, or for its turn
    RUNNING = "running"
    FINISHED = "finished"


class _EveryStep:
    """What every decode step reads or writes: side by side, since thousands of requests share a
    processor's cache."""

    __slots__ = (
        "decode_row",
        "last_step_id",
        "num_computed_tokens",
        "num_confirmed_tokens",
        "num_placeholders",
        "quiet_until",
        "ready_until",
        "request_id",
        "stop_ids",
        "token_ids",
    )
    decode_row: ScheduledRequest | None  # its share of every plain decode step
    last_step_id: int
    num_computed_tokens: int
    num_confirmed_tokens: int
    num_placeholders: int
    quiet_until: int  # confirmed tokens, at which it ends or its blocks are to be seen to
    ready_until: int  # computed tokens, up to which it has blocks and may have the tokens
    request_id: str
    stop_ids: frozenset[int]  # tokens that end it, if it is long enough
    token_ids: list[int]  # known ones


class RequestState(_EveryStep):
    """One request from `add` to its end.

    Steps in flight will bring tokens that are not known yet: `num_placeholders` counts the most
    that they may bring, and `num_computed_tokens` assumes as many. Both are corrected when a
    step's result says how many there were. `num_confirmed_tokens` counts only collected steps.

    A plain request decodes one token a step, without a grammar, and wants nothing but the token.
    Most steps change nothing about it but its counts: `ready_until` says up to where they can be
    planned like that, `quiet_until` up to where their results can be taken in like that.
    """

    __slots__ = (
        "cache_salt",
        "entered_at",
        "finish_reason",
        "has_sampled",
        "incarnation",
        "is_masked",
        "is_plain",
        "max_total_tokens",
        "num_cached_tokens",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "pools",
        "rank",
        "read_prefix_cache",
        "request",
        "sequence",
        "status",
        "stop_reason",
    )

    def __init__(self, request: EngineRequest, sequence: int, max_model_len: int) -> None:
        self.request = request
        self.request_id = request.request_id
        self.cache_salt = request.cache_salt
        self.read_prefix_cache = request.read_prefix_cache
        self.sequence = sequence  # order of arrival at this engine
        self.rank: tuple[float, ...] = ()  # place among the waiting; the policy's
        self.status = RequestStatus.WAITING
        self.incarnation = 0
        self.token_ids = request.prompt_token_ids + request.output_token_ids
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_total_tokens = min(self.num_prompt_tokens + request.max_tokens, max_model_len)
        self.num_computed_tokens = 0
        self.num_confirmed_tokens = 0
        self.num_placeholders = 0
        self.has_sampled = False  # a step of this incarnation samples, so the runner has drafts
        self.last_step_id = 0
        self.entered_at: float | None = None  # until its first token has come
        self.num_cached_tokens = 0
        self.num_prompt_logprobs = 0  # positions delivered
        self.pools = request.pools  # the step that samples is its last, and brings no token
        self.is_masked = self.is_plain = False
        self.stop_ids: frozenset[int] = frozenset()
        if not self.pools:
            params = request.sampling
            self.is_masked = params.is_masked
            wants_logprobs = params.wants_logprobs or params.prompt_logprobs is not None
            self.is_plain = not (self.is_masked or wants_logprobs)
            eos_token_ids = [] if params.ignore_eos else request.eos_token_ids
            self.stop_ids = _set_of((*eos_token_ids, *(params.stop_token_ids or ())))
        self._forget_decoding()
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_total_tokens(self) -> int:
        """Known tokens and the most that steps in flight may bring."""
        return len(self.token_ids) + self.num_placeholders

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def enter(self, num_computed_tokens: int) -> None:
        """Run, with the first tokens' keys and values at hand."""
        self.status = RequestStatus.RUNNING
        self.num_computed_tokens = self.num_confirmed_tokens = num_computed_tokens
        if self.incarnation == 0:
            self.entered_at = time.monotonic()
            self.num_cached_tokens = min(num_computed_tokens, self.num_prompt_tokens)

    def advance(self, step_id: int, num_tokens: int, num_drafts: int) -> bool:
        """Count a planned step as done; say whether it samples."""
        self.last_step_id = step_id
        self.num_computed_tokens += num_tokens
        samples = self.num_computed_tokens - num_drafts == self.num_total_tokens
        if samples:
            self.num_placeholders += 1 + num_drafts
            self.has_sampled = True
        return samples

    def make_ready(self, num_slots: int) -> None:
        """It decodes, and has room for so many tokens."""
        num_tokens_left = self.max_total_tokens - self.num_total_tokens
        self.ready_until = min(num_slots, self.num_computed_tokens + num_tokens_left)
        if self.decode_row is None:
            self.decode_row = ScheduledRequest(self.request_id, self.incarnation, 1, True)

    def take_token(self, result: RequestResult) -> bool:
        """Take in the token of a plain decode step; False, and no change, if more follows from it.

        As `confirm`, for a step that brings a token and nothing else, does not end the request,
        and fills no block.
        """
        num_confirmed, token_ids = self.num_confirmed_tokens + 1, result.token_ids
        if num_confirmed >= self.quiet_until or len(token_ids) != 1:
            return False
        if result.fault is not None or result.routed_experts is not None:
            return False
        if token_ids[0] in self.stop_ids:
            return False
        self.num_confirmed_tokens = num_confirmed
        self.num_placeholders -= 1
        self.token_ids += token_ids
        return True

    def rest_until(self, num_confirmed_tokens: int) -> None:
        """Nothing has to be done about its blocks before it has so many."""
        self.quiet_until = min(num_confirmed_tokens, self.max_total_tokens - 1)

    def confirm(self, planned: ScheduledRequest, num_sampled: int) -> None:
        """Correct what `advance` assumed: the step is collected and brought so many tokens."""
        num_expected = 1 + planned.num_drafts if planned.samples else 0
        num_rejected = num_expected - num_sampled
        self.num_placeholders -= num_expected
        self.num_computed_tokens -= num_rejected
        self.num_confirmed_tokens += planned.num_tokens - num_rejected

    def take_prefill_s(self) -> float:
        """At its first token: the seconds since it entered. Later: 0."""
        if self.entered_at is None:
            return 0.0
        entered_at, self.entered_at = self.entered_at, None
        return time.monotonic() - entered_at

    def preempt(self) -> None:
        """Forget everything but the known tokens; what steps in flight bring is dropped."""
        self.status = RequestStatus.WAITING
        self.incarnation += 1
        self.num_computed_tokens = self.num_confirmed_tokens = self.num_placeholders = 0
        self.has_sampled = False
        self._forget_decoding()

    def finish(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self._forget_decoding()

    def _forget_decoding(self) -> None:
        self.decode_row = None
        self.ready_until = self.quiet_until = 0


def _set_of(token_ids: tuple[int, ...]) -> frozenset[int]:
    """One set for all requests of a model that stop at the same few tokens."""
    return _shared_set(token_ids) if len(token_ids) <= MAX_SHARED_IDS else frozenset(token_ids)


@lru_cache(maxsize=256)
def _shared_set(token_ids: tuple[int, ...]) -> frozenset[int]:
    return frozenset(token_ids)
