"""What a user gets back: RequestOutput and its completions, under the names vLLM's users know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Generic, NoReturn, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass
class Logprob:
    """The log-probability of one token at one position."""

    logprob: float
    rank: int | None = None  # 1 is the most likely token
    decoded_token: str | None = None


LogprobsAtPosition = dict[int, Logprob]  # by token id


@dataclass
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON text; only its beginning if not `complete`
    complete: bool = False


@dataclass(frozen=True)
class Message:
    """A whole output of a chat, read. `content` and `reasoning` are empty where there was none."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


@dataclass
class DraftCounts:
    """Draft tokens that were verified for a completion, with speculative decoding.

    A proposal has one or more tokens. `accepted` counts proposals by how many of their tokens were
    accepted.
    """

    num_draft_tokens: int = 0
    accepted: list[int] = field(default_factory=list)

    @property
    def num_drafts(self) -> int:
        """The number of proposals."""
        return sum(self.accepted)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(length * count for length, count in enumerate(self.accepted))

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per verified proposal, with the one that the model itself adds."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    def add(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Count a proposal."""
        self.num_draft_tokens += num_draft_tokens
        self.accepted += [0] * (num_accepted + 1 - len(self.accepted))
        self.accepted[num_accepted] += 1

    def merge(self, other: DraftCounts) -> None:
        self.num_draft_tokens += other.num_draft_tokens
        self.accepted += [0] * (len(other.accepted) - len(self.accepted))
        for length, count in enumerate(other.accepted):
            self.accepted[length] += count


@dataclass
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsAtPosition] | None = None
    # "stop", "length", "abort" or "error"; "tool_calls" with a `message` that ends with calls.
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop token or stop text; None for end of text
    # With enable_return_routed_experts, once the completion is finished: [tokens, layers, top_k],
    # the experts of every token but the last, which is never computed with, prompt included.
    routed_experts: npt.NDArray[np.int16] | None = None
    drafts: DraftCounts | None = None  # so far; None if none were verified
    message: Message | None = None  # of `LLM.chat(..., parse_output=True)`

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class PoolingOutput:
    """What a pooling request ended with; None where it failed."""

    data: npt.NDArray[np.float32] | None  # [numbers], or [tokens, numbers] token-wise
    # What `PoolingParams.vectors` asked for: sparse ones as weights by token ID.
    vectors: dict[str, npt.NDArray[np.float32] | dict[int, float]] = field(default_factory=dict)


@dataclass
class EmbeddingOutput:
    embedding: npt.NDArray[np.float32] | None  # [embedding_size]

    @property
    def hidden_size(self) -> int:
        return 0 if self.embedding is None else len(self.embedding)


@dataclass
class ClassificationOutput:
    probs: npt.NDArray[np.float32] | None  # [num_labels]

    @property
    def num_classes(self) -> int:
        return 0 if self.probs is None else len(self.probs)


@dataclass
class ScoringOutput:
    score: float | None


PooledOutput = TypeVar(
    "PooledOutput", PoolingOutput, EmbeddingOutput, ClassificationOutput, ScoringOutput
)


@dataclass
class PoolingRequestOutput(Generic[PooledOutput]):
    """A pooling request, done. `error` says why, where it failed."""

    request_id: str
    outputs: PooledOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    error: str | None = None


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]


@dataclass
class RequestStateStats:
    """Times of a request so far, in seconds; 0 where it has not come so far.

    `arrival_time` is the time of day. The others are from `time.monotonic`. Of `n` completions,
    tokens are counted together.
    """

    arrival_time: float
    queued_ts: float
    num_generation_tokens: int = 0
    scheduled_ts: float = 0.0  # its first step
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0  # from queued_ts

    def add_tokens(self, num_tokens: int, now: float, prefill_s: float) -> None:
        """New tokens are there. `prefill_s` comes with the first one."""
        self.num_generation_tokens += num_tokens
        self.last_token_ts = now
        if not self.first_token_ts:
            self.first_token_ts, self.scheduled_ts = now, now - prefill_s
            self.first_token_latency = now - self.queued_ts


@dataclass
class RequestOutput:
    """What a request has produced: so far, since the last time, or in all (`output_kind`)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[LogprobsAtPosition | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestStateStats | None = None  # of generation
    error: str | None = None
    can_retry: bool = False  # with an error: it was never begun, and may be sent again later
    error_field: str | None = None  # where the request itself was wrong: the field
    # Of vLLM's outputs, for what Penstock does not do:
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None

    @property
    def lora_request(self) -> NoReturn:
        raise AttributeError("RequestOutput has no 'lora_request': it is the one that you gave")
