"""What the scheduler asks of the runner for one step, and what comes back."""

from __future__ import annotations

import enum

import msgspec

from penstock.protocol.adapter import AdapterJob, FinishedJob
from penstock.protocol.media import MediaItem, MediaJob
from penstock.protocol.pooling import Payload, PoolingParams
from penstock.protocol.sampling import SamplingParams

Job = AdapterJob | MediaJob

NO_SLOT = -1  # the adapter slot of requests without one


class NewRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request that enters the runner's tables: seen first, or back after a preemption."""

    request_id: str
    token_ids: list[int]  # the prompt, then the output known so far
    num_prompt_tokens: int
    num_computed_tokens: int  # served by the prefix cache
    params: SamplingParams | PoolingParams
    seed: int
    eos_token_ids: list[int] = []
    bad_words_token_ids: list[list[int]] = []
    num_prompt_logprobs: int = 0  # prompt positions whose logprobs are delivered already
    num_unpooled: int = 0  # see EngineRequest
    second_segment: int | None = None  # see EngineRequest
    cache_salt: str | None = None  # drafters share past outputs only between requests of one salt
    adapter_slot: int = NO_SLOT
    media: list[MediaItem] = []  # in the order of their offsets
    # Tokens that see each other, in order: first, and one past the last (`StepLimits.spans`).
    spans: list[tuple[int, int]] = []

    @property
    def sampling(self) -> SamplingParams:
        assert isinstance(self.params, SamplingParams), "this engine generates"
        return self.params

    @property
    def pooling(self) -> PoolingParams:
        assert isinstance(self.params, PoolingParams), "this engine pools"
        return self.params


class ScheduledRequest(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """One request's share of a step."""

    request_id: str
    incarnation: int  # how often it was preempted; results of an older one are dropped
    num_tokens: int  # tokens to compute in this step, drafted ones included
    samples: bool  # this step reaches the end of the known tokens: a new one is sampled, or all
    # are pooled
    new_block_ids: list[list[int]] = []  # per KV group, appended to the block table; [] if none
    num_drafts: int = 0  # how many of num_tokens are drafts, which the runner's tables hold


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker needs for one step and nothing else.

    Block tables and tokens live in the runner's tables: a decode step's plan carries neither
    prompt tokens nor full block tables.
    """

    step_id: int
    scheduled: list[ScheduledRequest]
    new_requests: list[NewRequest] = []
    jobs: list[Job] = []  # in order, before the new requests
    released_ids: list[str] = []  # finished, aborted or preempted: their rows may be reused
    masked: bool = False  # a request with a grammar samples: `StepMasks` come before the tokens
    num_drafts: int = 0  # to propose after this step for each sampling request; 0: no drafter runs
    least_chance: float = 0.0  # that a draft holds; drafters that know leave those below it out
    joins: bool = False  # other replicas have tokens: exchange them even if this step has none

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled)


class StepMasks(msgspec.Struct, frozen=True, kw_only=True):
    """Which tokens the requests with a grammar may sample in one step; the others are free."""

    request_ids: list[str]
    num_rows: list[int]  # of each of these requests: 1, and 1 for each draft
    bits: memoryview  # int32 [sum(num_rows), ceil(vocab_size / 32)]: token i is bit i % 32 of word
    # i // 32


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one position: the chosen token first, then the most likely ones
    or those that the request names."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of the chosen token, 1 is the most likely


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of prompt tokens `start`, `start + 1`, ...; start is at least 1."""

    start: int
    positions: list[TokenLogprobs]


class RoutedExperts(msgspec.Struct, frozen=True, array_like=True):
    """The experts of tokens `start`, `start + 1`, ... of a request."""

    start: int
    num_layers: int  # that have experts
    top_k: int
    ids: bytes  # int16 [tokens, num_layers, top_k]


class RequestResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What one scheduled request got out of a step."""

    request_id: str
    incarnation: int
    token_ids: list[int] = []  # none for a chunk of a prompt, several with speculation
    logprobs: list[TokenLogprobs] = []  # one for each token, where asked for
    prompt_logprobs: PromptLogprobs | None = None
    routed_experts: RoutedExperts | None = None  # of all the step's tokens; the start is not known
    payload: Payload | None = None  # what a pooling request ends with
    named: dict[str, Payload] = {}  # and what else it asked for, by name: see `NAMED`
    fault: str | None = None  # this request failed; its blocks are never published
    drafts: list[int] = []  # proposed to come next, where others must know them
    num_drafts: int | None = None  # proposed to come next; None: as many as the plan asks for


class StepFailure(enum.Enum):
    OUT_OF_MEMORY = "out of memory"
    ERROR = "error"
    SKIPPED = "skipped"  # a step before it failed, and the worker has not been reset since


class StepResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    step_id: int
    results: list[RequestResult] = []
    failure: StepFailure | None = None  # nothing of the step counts
    metrics: dict[str, int] = {}  # what the worker counted since the last step: by counter
    finished_jobs: list[FinishedJob] = []  # that ran beside the steps


class Settled(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """What a step gave a request, for the pipeline stages that did not sample."""

    token_ids: list[int]
    drafts: list[int] = []  # to verify next


def settled(result: StepResult) -> dict[str, Settled]:
    """By request, of those that sampled."""
    return {
        item.request_id: Settled(item.token_ids, item.drafts)
        for item in result.results
        if item.token_ids
    }
