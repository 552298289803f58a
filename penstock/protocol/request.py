"""EngineRequest: everything needed to run a request, or to run it again."""

from __future__ import annotations

import msgspec

from penstock.protocol.adapter import Adapter
from penstock.protocol.media import MediaItem
from penstock.protocol.pooling import PoolingParams
from penstock.protocol.sampling import SamplingParams

Params = SamplingParams | PoolingParams


class ThinkingFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a model writes its reasoning, for a request that limits it.

    The output begins within the reasoning if `is_open`, else it may begin with one of `starts`. The
    reasoning ends at one of `ends`, or is made to end with `closing_token_ids`.
    """

    starts: list[str]
    ends: list[str]
    closing_token_ids: list[int]
    is_open: bool = False


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Immutable and serializable; checked by the frontend before it reaches the engine.

    `output_token_ids` is empty for a fresh request. A replay carries the tokens that its client
    has already seen: it enters as if preempted, so penalties, limits, seeds and usage keep the
    boundary between prompt and output.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: Params  # max_tokens is resolved: never None here
    seed: int  # drawn by the frontend where the user gave none; 0 <= seed < 2**64
    eos_token_ids: list[int] = []
    bad_words_token_ids: list[list[int]] = []
    priority: int = 0  # lower runs first
    arrival_time: float = 0.0  # on a clock that never goes back
    cache_salt: str | None = None
    tenant: str = ""  # whose it is, where tenants take turns
    read_prefix_cache: bool = True  # off where every prompt row's results are wanted
    output_token_ids: list[int] = []
    is_search_step: bool = False  # of a beam search, which is logged and counted as a whole
    has_run: bool = False  # on an engine that died: nobody may say that it waited for too long
    thinking: ThinkingFormat | None = None  # with params.thinking_token_budget
    num_unpooled: int = 0  # tokens at the beginning that a mean leaves out
    second_segment: int | None = None  # where the second text of a pair begins, if that counts
    adapter: Adapter | None = None  # None: the base model
    media: list[MediaItem] = []  # of the prompt, in the order of their offsets

    @property
    def is_new(self) -> bool:
        """Whether it has yet to have its first turn."""
        return not self.output_token_ids and not self.has_run

    @property
    def sampling(self) -> SamplingParams:
        assert isinstance(self.params, SamplingParams), "pooling requests do not get this far"
        return self.params

    @property
    def pools(self) -> bool:
        """Whether it ends with a vector, not with tokens."""
        return isinstance(self.params, PoolingParams)

    @property
    def max_tokens(self) -> int:
        if isinstance(self.params, PoolingParams):
            return 0
        assert self.params.max_tokens is not None, "the frontend resolves max_tokens"
        return self.params.max_tokens
