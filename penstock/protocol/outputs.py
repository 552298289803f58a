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
    """Natural logarithm of the token's probability."""
    rank: int | None = None
    """1 is the most likely token."""
    decoded_token: str | None = None
    """The token's text."""


LogprobsAtPosition = dict[int, Logprob]  # by token id


@dataclass
class ToolCall:
    """A call of a tool that the model wrote."""

    id: str
    """The name by which a tool message answers it."""
    name: str
    """The tool's name."""
    arguments: str
    """JSON text; only its beginning if not `complete`."""
    complete: bool = False
    """Whether the model wrote the whole call."""


@dataclass(frozen=True)
class Message:
    """A whole output of a chat, read. `content` and `reasoning` are empty where there was none."""

    content: str = ""
    """The answer."""
    reasoning: str = ""
    """What the model thought before it."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """The calls, in the model's order."""


@dataclass
class DraftCounts:
    """Draft tokens that were verified for a completion, with speculative decoding.

    A proposal has one or more tokens. `accepted` counts proposals by how many of their tokens were
    accepted.
    """

    num_draft_tokens: int = 0
    """The number of draft tokens."""
    accepted: list[int] = field(default_factory=list)

    @property
    def num_drafts(self) -> int:
        """The number of proposals."""
        return sum(self.accepted)

    @property
    def num_accepted_tokens(self) -> int:
        """The number of draft tokens that were accepted."""
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
    """Its place among the `n` completions of the prompt."""
    text: str = ""
    """The generated text."""
    token_ids: list[int] = field(default_factory=list)
    """The generated tokens."""
    cumulative_logprob: float | None = None
    """Sum of the tokens' log-probabilities, with `logprobs`."""
    logprobs: list[LogprobsAtPosition] | None = None
    """For each generated token, log-probabilities by token ID, with `logprobs`."""
    finish_reason: str | None = None
    """`stop`, `length`, `abort` or `error`; `tool_calls` with a `message` that ends with calls.
    None while it is not finished."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None for the end of text."""
    routed_experts: npt.NDArray[np.int16] | None = None
    """With `enable_return_routed_experts`, once it is finished: [tokens, layers, top_k], the
    experts of every token but the last, which is never computed with, prompt included."""
    drafts: DraftCounts | None = None
    """Draft tokens so far, with speculative decoding; None if none were verified."""
    message: Message | None = None
    """Content, reasoning and tool calls, with `LLM.chat(..., parse_output=True)`."""

    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None


@dataclass
class PoolingOutput:
    """What a pooling request ended with; None where it failed."""

    data: npt.NDArray[np.float32] | None
    """One vector, [numbers], or one per token, [tokens, numbers]."""
    vectors: dict[str, npt.NDArray[np.float32] | dict[int, float]] = field(default_factory=dict)
    """What `PoolingParams.vectors` asked for: sparse ones as weights by token ID."""


@dataclass
class EmbeddingOutput:
    """The embedding of a prompt."""

    embedding: npt.NDArray[np.float32] | None
    """The vector, [embedding_size]; None if the request failed."""

    @property
    def hidden_size(self) -> int:
        """The vector's length."""
        return 0 if self.embedding is None else len(self.embedding)


@dataclass
class ClassificationOutput:
    """The probabilities of a model's labels for a prompt."""

    probs: npt.NDArray[np.float32] | None
    """One number per label, [num_labels]; None if the request failed."""

    @property
    def num_classes(self) -> int:
        """The number of labels."""
        return 0 if self.probs is None else len(self.probs)


@dataclass
class ScoringOutput:
    """The score of a pair of texts."""

    score: float | None
    """Higher is more similar, or more relevant; None if the request failed."""


PooledOutput = TypeVar(
    "PooledOutput", PoolingOutput, EmbeddingOutput, ClassificationOutput, ScoringOutput
)


@dataclass
class PoolingRequestOutput(Generic[PooledOutput]):
    """A pooling request, done. `error` says why, where it failed."""

    request_id: str
    """The request's ID."""
    outputs: PooledOutput
    """The vector or the score."""
    prompt_token_ids: list[int]
    """The prompt's tokens."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache had."""
    finished: bool = True
    """Always true."""
    error: str | None = None
    """Why the request failed; None if it did not."""


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
    """When it came."""
    queued_ts: float
    """When it was queued."""
    num_generation_tokens: int = 0
    """Generated tokens so far."""
    scheduled_ts: float = 0.0
    """When its first step began."""
    first_token_ts: float = 0.0
    """When the first token came."""
    last_token_ts: float = 0.0
    """When the last token came."""
    first_token_latency: float = 0.0
    """From `queued_ts` to `first_token_ts`."""

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
    """The request's ID."""
    prompt: str | None
    """The prompt's text; None if token IDs were given."""
    prompt_token_ids: list[int]
    """The prompt's tokens."""
    outputs: list[CompletionOutput]
    """The `n` completions."""
    finished: bool
    """Whether all completions are finished."""
    prompt_logprobs: list[LogprobsAtPosition | None] | None = None
    """For each prompt token, log-probabilities by token ID, with `prompt_logprobs`. The first is
    None."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache had."""
    metrics: RequestStateStats | None = None
    """When it was queued, when its tokens came."""
    error: str | None = None
    """Why the request failed; None if it did not."""
    can_retry: bool = False
    """With an error: the request was never begun, and may be sent again later."""
    error_field: str | None = None
    """With an error of the request itself: the field that was wrong."""
    # Of vLLM's outputs, for what Penstock does not do:
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None

    @property
    def lora_request(self) -> NoReturn:
        raise AttributeError("RequestOutput has no 'lora_request': it is the one that you gave")
