"""RequestState: owns the scheduler's state of one request, and how a step changes it."""

from __future__ import annotations

import enum
import hashlib
import time
from functools import lru_cache

from msgspec.structs import replace

from penstock.protocol.delta import FinishReason
from penstock.protocol.request import EngineRequest
from penstock.protocol.step import RequestResult, ScheduledRequest

MAX_SHARED_IDS = 64  # larger sets of stop tokens are not cached: clients may send millions


class RequestStatus(enum.Enum):
    WAITING = "waiting"  # at a gate or in the queue
    RUNNING = "running"
    FINISHED = "finished"


class _EveryStep:
    """The fields that every decode step reads or writes.

    They lie side by side because thousands of requests share the CPU's cache.
    """

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
    decode_row: ScheduledRequest | None  # its row in every plain decode step
    last_step_id: int
    num_computed_tokens: int
    num_confirmed_tokens: int
    num_placeholders: int
    quiet_until: int  # confirmed tokens at which it may end or its blocks need work
    ready_until: int  # computed tokens up to which it has blocks and may generate
    request_id: str
    stop_ids: frozenset[int]  # tokens that end it once it has min_tokens
    token_ids: list[int]  # known tokens: prompt, then output


class RequestState(_EveryStep):
    """One request from `add` to its end.

    Steps in flight produce tokens that are not known yet. `num_placeholders` is the maximum number
    of them, and `num_computed_tokens` assumes this maximum. Both are corrected when the step's
    result arrives. `num_confirmed_tokens` counts collected steps only.

    A plain request has no grammar and asks for no logprobs. Without drafts it decodes one token a
    step, and most steps change only its counts. Up to `ready_until` such steps are planned on a
    fast path. Up to `quiet_until` their results are applied on a fast path.
    """

    __slots__ = (
        "adapter",
        "cache_salt",
        "drafts_held",
        "drafts_tried",
        "entered_at",
        "finish_reason",
        "gives_only_tokens",
        "has_sampled",
        "incarnation",
        "is_masked",
        "max_total_tokens",
        "media",
        "num_cached_tokens",
        "num_drafts",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_skipped_drafts",
        "pools",
        "probe_after",
        "rank",
        "read_prefix_cache",
        "request",
        "sequence",
        "spans",
        "speculates",
        "status",
        "stop_reason",
        "tower_slot",
    )

    def __init__(
        self,
        request: EngineRequest,
        sequence: int,
        max_model_len: int,
        spans: list[tuple[int, int]] | None = None,
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.cache_salt = request.cache_salt
        self.adapter = request.adapter
        self.read_prefix_cache = request.read_prefix_cache
        self.sequence = sequence  # order of arrival at this engine
        self.rank: tuple[float, ...] = ()  # set by the policy
        self.status = RequestStatus.WAITING
        self.incarnation = 0
        self.token_ids = request.prompt_token_ids + request.output_token_ids
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.spans = spans or []  # of its prompt, see `find_spans`
        self.media = request.media  # by hashes that cover all that their embeddings depend on
        self.tower_slot: int | None = None  # of its adapter, if that changes the tower
        self.max_total_tokens = min(self.num_prompt_tokens + request.max_tokens, max_model_len)
        self.num_computed_tokens = 0
        self.num_confirmed_tokens = 0
        self.num_placeholders = 0
        self.has_sampled = False  # in this incarnation
        self.num_drafts = 0  # in the runner's tables when the steps in flight are done, at most
        self.drafts_held = self.drafts_tried = 0.0  # decayed counts, see Speculation
        self.num_skipped_drafts = 0  # steps in a row to which it brought none of its drafts
        self.probe_after = 8  # as many, before it tries one again
        self.last_step_id = 0
        self.entered_at: float | None = None  # reset at the first token
        self.num_cached_tokens = 0
        self.num_prompt_logprobs = 0  # positions delivered
        self.pools = request.pools  # its sampling step is the last and produces no token
        self.is_masked = self.gives_only_tokens = False
        self.stop_ids: frozenset[int] = frozenset()
        self.speculates = False
        if not self.pools:
            params = request.sampling
            self.speculates = params.speculative
            self.is_masked = params.is_masked
            wants_logprobs = params.wants_logprobs or params.prompt_logprobs is not None
            self.gives_only_tokens = not (self.is_masked or wants_logprobs)
            eos_token_ids = [] if params.ignore_eos else request.eos_token_ids
            self.stop_ids = _set_of((*eos_token_ids, *(params.stop_token_ids or ())))
        self._forget_decoding()
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def adapter_digest(self) -> str | None:
        return None if self.adapter is None else self.adapter.digest

    @property
    def adapter_name(self) -> str | None:
        return None if self.adapter is None else self.adapter.name

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_total_tokens(self) -> int:
        """Known tokens plus the maximum from steps in flight."""
        return len(self.token_ids) + self.num_placeholders

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def awaits_media(self) -> bool:
        """Whether its prompt has media and is not computed."""
        return bool(self.request.media) and self.num_computed_tokens < self.num_prompt_tokens

    @property
    def media_hashes(self) -> dict[int, bytes]:
        """By the offset of each item."""
        return {item.offset: item.hash for item in self.request.media}

    def key_media_by_adapter(self) -> None:
        """Its media are encoded with its adapter, apart from those of other requests."""
        assert self.adapter is not None
        suffix = self.adapter.digest.encode()
        self.media = [
            replace(item, hash=hashlib.sha256(item.hash + suffix).digest())
            for item in self.request.media
        ]

    def enter(self, num_computed_tokens: int) -> None:
        """Start to run. The KV of the first `num_computed_tokens` tokens is cached."""
        self.status = RequestStatus.RUNNING
        self.num_computed_tokens = self.num_confirmed_tokens = num_computed_tokens
        if self.incarnation == 0:
            self.entered_at = time.monotonic()
            self.num_cached_tokens = min(num_computed_tokens, self.num_prompt_tokens)

    def advance(self, step_id: int, num_tokens: int, num_drafts: int) -> bool:
        """Count a planned step as done. Return whether it samples."""
        self.last_step_id = step_id
        self.num_computed_tokens += num_tokens
        samples = self.num_computed_tokens - num_drafts == self.num_total_tokens
        if samples:
            self.num_placeholders += 1 + num_drafts
            self.has_sampled = True
        return samples

    def make_ready(self, num_slots: int) -> None:
        """Let it decode on the fast path, up to `num_slots` tokens, if it qualifies."""
        if not (self.has_sampled and self.gives_only_tokens):
            return
        num_tokens_left = self.max_total_tokens - self.num_total_tokens
        self.ready_until = min(num_slots, self.num_computed_tokens + num_tokens_left)
        if self.decode_row is None:
            self.decode_row = ScheduledRequest(self.request_id, self.incarnation, 1, True)

    def take_token(self, result: RequestResult) -> bool:
        """Apply the token of a plain decode step on the fast path.

        Returns False and changes nothing if the result has more than one plain token, may end the
        request, or fills a block.
        """
        num_confirmed, token_ids = self.num_confirmed_tokens + 1, result.token_ids
        if num_confirmed >= self.quiet_until or len(token_ids) != 1:
            return False
        if result.fault is not None or result.routed_experts is not None:
            return False
        if token_ids[0] in self.stop_ids:
            return False
        if result.num_drafts is not None and self.num_placeholders == 1:
            self.num_drafts = min(result.num_drafts, self.num_drafts)
        self.num_confirmed_tokens = num_confirmed
        self.num_placeholders -= 1
        self.token_ids += token_ids
        return True

    def rest_until(self, num_confirmed_tokens: int) -> None:
        """Its blocks need no work before it has this many confirmed tokens."""
        self.quiet_until = min(num_confirmed_tokens, self.max_total_tokens - 1)

    def confirm(self, planned: ScheduledRequest, num_sampled: int) -> None:
        """Correct what `advance` assumed, now that the step produced `num_sampled` tokens."""
        num_expected = 1 + planned.num_drafts if planned.samples else 0
        num_rejected = num_expected - num_sampled
        self.num_placeholders -= num_expected
        self.num_computed_tokens -= num_rejected
        self.num_confirmed_tokens += planned.num_tokens - num_rejected

    def take_prefill_s(self) -> float:
        """Return the seconds from `enter` to the first token on the first call, then 0."""
        if self.entered_at is None:
            return 0.0
        entered_at, self.entered_at = self.entered_at, None
        return time.monotonic() - entered_at

    def preempt(self) -> None:
        """Keep only the known tokens. Results of steps in flight are dropped."""
        self.status = RequestStatus.WAITING
        self.incarnation += 1
        self.num_computed_tokens = self.num_confirmed_tokens = self.num_placeholders = 0
        self.has_sampled = False
        self.num_drafts = 0
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
    """Share one set between all requests with the same stop tokens."""
    return _shared_set(token_ids) if len(token_ids) <= MAX_SHARED_IDS else frozenset(token_ids)


@lru_cache(maxsize=256)
def _shared_set(token_ids: tuple[int, ...]) -> frozenset[int]:
    return frozenset(token_ids)
