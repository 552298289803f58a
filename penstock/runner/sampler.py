"""The sampler: chooses one token per row of logits, with the parameters of the row's request.

The order for each row is vLLM's:

1. log-probabilities, from the logits as the model gave them (unless `logprobs_mode` asks for those
   after step 5);
2. masks: grammar, allowed_token_ids, min_tokens, bad_words; then logit_bias;
3. custom processors;
4. repetition penalty, then frequency and presence penalties;
5. greedy: the most likely token, the lowest id among ties;
   otherwise temperature, min_p, top_k, top_p, and a draw with the request's own noise.

A row's result depends only on its logits, its request and its position. The sampler keeps no state
between steps: penalties count tokens in the token table each time. Therefore a request gets the
same tokens if it is preempted or replayed, or if several positions are verified at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.config.model import LogprobsMode
from penstock.ops import sampling as reference
from penstock.ops.sampling import NEG_INF
from penstock.ops.sharded_sampling import VocabShard
from penstock.protocol.step import NewRequest
from penstock.runner.logits_processors import LogitsProcessor, ProcessorHost
from penstock.runner.logprobs import RowLogprobs
from penstock.runner.sampling_tables import Feature, SamplingTables, to_device

CHANGES = ~int(
    Feature.RANDOM
    | Feature.TRUNCATION
    | Feature.WHOLE_ROWS
    | Feature.LOGPROBS
    | Feature.NAMED_LOGPROBS
)
"""Features that change logits before the draw."""
IGNORED = int(Feature.PROCESSORS | Feature.LOGPROBS | Feature.NAMED_LOGPROBS)
"""Features that drafts do without."""
PROCESSED = ("processed_logprobs", "processed_logits")


ChooseTokens = Callable[..., tuple[Tensor, Tensor]]
"""The op that chooses tokens for greedy and random rows; see `penstock.ops.sampling`."""


class TokenTables(Protocol):
    """What the sampler reads from the runner's tables, by slot."""

    @property
    def token_ids(self) -> Tensor: ...  # [max_num_seqs, max_model_len] int32: prompt, then output

    @property
    def num_prompt_tokens(self) -> Tensor: ...  # [max_num_seqs] int32


@dataclass(frozen=True)
class SamplingRows:
    """The request and the position of each row of logits.

    The tokens before a row are `token_ids[slot, :position]`. A slot may have several rows.
    """

    slots: Tensor  # [rows] int64, on the device
    positions: Tensor  # [rows] int64, on the device: position of the token to be sampled
    host_slots: NDArray[np.int64]  # [rows], the same as slots
    max_position: int  # an upper bound of the positions

    def __len__(self) -> int:
        return len(self.host_slots)

    def select(self, host_index: NDArray[np.int64], index: Tensor) -> SamplingRows:
        """Some of the rows. Both arguments hold the same row numbers."""
        return SamplingRows(
            self.slots[index], self.positions[index], self.host_slots[host_index], self.max_position
        )


@dataclass(frozen=True)
class SampledTokens:
    """A step's tokens, still on the device."""

    token_ids: Tensor  # [rows] int64; 0 where faulted
    faulted: Tensor  # [rows] bool: NaN or +inf in the logits, no token left, or in `errors`
    errors: dict[int, str] = field(default_factory=dict)  # by row: what a custom processor raised
    logprobs: RowLogprobs | None = None

    def to_host(self, with_tokens: bool = True) -> SampledTokens:
        """Start the copy to the host. On an accelerator it is complete after a synchronization."""
        tokens, faulted = self.token_ids, self.faulted
        if with_tokens:
            tokens = tokens.to("cpu", non_blocking=True)
            faulted = faulted.to("cpu", non_blocking=True)
        return SampledTokens(
            tokens,
            faulted,
            self.errors,
            None if self.logprobs is None else self.logprobs.to_host(),
        )


@dataclass(frozen=True)
class SamplingKind:
    """What rows with unchanged logits need from `choose_tokens`."""

    draws: bool  # whether any row has a temperature
    truncates: bool  # whether any row has top_k, top_p or min_p
    whole_rows: bool = False  # whether truncation needs logits that other ranks have

    @classmethod
    def of(cls, features: int, is_sharded: bool = False) -> SamplingKind:
        return cls(
            bool(features & Feature.RANDOM),
            bool(features & Feature.TRUNCATION),
            is_sharded and bool(features & Feature.WHOLE_ROWS),
        )


class Sampler:
    """Holds the sampling parameters of the requests in the runner's slots, and samples for them."""

    def __init__(
        self,
        tables: TokenTables,
        vocab_size: int,
        device: torch.device | str,
        choose_tokens: ChooseTokens,
        processors: Sequence[LogitsProcessor] = (),
        logprobs_mode: LogprobsMode = "raw_logprobs",
        shard: VocabShard | None = None,
    ) -> None:
        num_slots = tables.token_ids.shape[0]
        self._tokens = tables
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._params = SamplingTables(num_slots, vocab_size, self._device)
        self._choose = choose_tokens
        self._shard = shard
        self._processors = ProcessorHost(processors, num_slots)
        self._logprobs_mode = logprobs_mode

    def add(self, slot: int, request: NewRequest) -> None:
        """A request enters an empty slot."""
        self._params.add(slot, request)
        if self._processors.add(slot, request):
            self._params.features[slot] |= Feature.PROCESSORS

    def remove(self, slot: int) -> None:
        """The request leaves its slot. An empty slot stays empty."""
        self._processors.remove(slot)
        self._params.remove(slot)

    def wants_logprobs(self, rows: SamplingRows) -> bool:
        """Whether any of these rows requests log-probabilities, which need the unchanged logits."""
        return bool((self._params.features[rows.host_slots] & Feature.LOGPROBS).any())

    def kind_of(self, rows: SamplingRows) -> SamplingKind | None:
        """What `choose` must do for these rows; None if they need more than `choose`."""
        used = int(np.bitwise_or.reduce(self._params.features[rows.host_slots]))
        if used & CHANGES or self._processors.has_refused:
            return None
        return SamplingKind.of(used, self._shard is not None)

    def choose(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        kind: SamplingKind,
        **options: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Tokens and faults [rows] of final logits of all tokens, from the device's op."""
        floats, ints = self._params.device_tables
        return self._choose(
            logits, slots, positions, floats, ints,
            draws=kind.draws, truncates=kind.truncates, **options,
        )  # fmt: skip

    def choose_own(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        kind: SamplingKind,
        allowed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Like `choose`, from the logits of this rank's tokens."""
        shard = self._shard
        if shard is None or kind.whole_rows:
            options = {} if allowed is None else {"allowed": allowed}
            return self.choose(self.whole(logits), slots, positions, kind, **options)
        floats, ints = self._params.device_tables
        return shard.choose_tokens(
            logits, slots, positions, floats, ints,
            allowed=allowed, draws=kind.draws, truncates=kind.truncates,
        )  # fmt: skip

    def whole(self, logits: Tensor) -> Tensor:
        """The logits of all tokens, from those of this rank's."""
        return logits if self._shard is None else self._shard.whole(logits)

    def with_logprobs(
        self, logits: Tensor, tokens: Tensor, faulted: Tensor, rows: SamplingRows
    ) -> SampledTokens:
        """Add logprobs to tokens that `choose_own` chose from these logits."""
        features = self._params.features[rows.host_slots]
        if (features & Feature.LOGPROBS).any():
            logits = self.whole(logits)
        return SampledTokens(tokens, faulted, {}, self._logprobs(logits, tokens, rows, features))

    def sample(
        self, logits: Tensor, rows: SamplingRows, allowed: Tensor | None = None
    ) -> SampledTokens:
        """Choose one token per row of this rank's logits, [rows, tokens], which stay unchanged.

        allowed: one bit per token, int32 [rows, ceil(vocab / 32)].
        """
        kind = self.kind_of(rows) if self._shard is not None and len(rows) else None
        if kind is not None and not self.wants_logprobs(rows):
            chosen = self.choose_own(logits, rows.slots, rows.positions, kind, allowed)
            return SampledTokens(*chosen)
        return self._sample_whole(self.whole(logits), rows, allowed)

    def _sample_whole(
        self, logits: Tensor, rows: SamplingRows, allowed: Tensor | None
    ) -> SampledTokens:
        features = self._params.features[rows.host_slots]
        used = int(np.bitwise_or.reduce(features)) if len(features) else 0
        work, errors = logits, self._processors.refused(rows.host_slots)
        options: dict[str, Tensor] = {}
        if used & CHANGES:  # disallowed tokens are banned before any other change
            work = logits.to(torch.float32, copy=True)
            errors |= self._change_logits(work, rows, features, allowed)
        elif allowed is not None:
            options["allowed"] = allowed
        tokens, faulted = self.choose(
            work, rows.slots, rows.positions, SamplingKind.of(used), **options
        )
        if work is not logits:
            faulted |= ~torch.isfinite(logits.amax(-1))
        if errors:
            faulted[to_device(np.array(list(errors)), self._device)] = True
        if work is not logits or errors:
            tokens = tokens.masked_fill(faulted, 0)
        shown = logits
        if self._logprobs_mode in PROCESSED and used & Feature.LOGPROBS:
            shown = work
            if "allowed" in options:
                shown = reference.mask_tokens(logits, options["allowed"])
        return SampledTokens(tokens, faulted, errors, self._logprobs(shown, tokens, rows, features))

    def draft_kind(self, host_slots: NDArray[np.int64]) -> SamplingKind | None:
        """What `choose` must do for drafts of these requests; None if they need `draft`."""
        used = int(np.bitwise_or.reduce(self._params.features[host_slots] & ~IGNORED))
        return None if used & CHANGES else SamplingKind.of(used)

    def draft(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """The tokens [rows] that these logits would give, with the requests' own noise.

        Grammars and custom processors are left out: drafts are verified anyway.
        """
        features = self._params.features[rows.host_slots] & ~IGNORED
        used = int(np.bitwise_or.reduce(features))
        if used & CHANGES:
            logits = logits.to(torch.float32, copy=True)
            self._change_logits(logits, rows, features, None)
        tokens, _ = self.choose(logits, rows.slots, rows.positions, SamplingKind.of(used))
        return tokens

    def _change_logits(
        self, work: Tensor, rows: SamplingRows, features: NDArray[np.int64], allowed: Tensor | None
    ) -> dict[int, str]:
        """Apply steps 2 to 4 in place, each to the rows that use it.

        Returns processor errors by row.
        """
        if allowed is not None:
            work.masked_fill_(~reference.unpack_bitmask(allowed, self._vocab_size), NEG_INF)
        errors: dict[int, str] = {}
        for feature, change in (
            (Feature.ALLOWED_TOKENS, self._keep_allowed),
            (Feature.MIN_TOKENS, self._ban_stops),
            (Feature.BAD_WORDS, self._ban_words),
            (Feature.LOGIT_BIAS, self._add_bias),
        ):
            users = np.flatnonzero(features & feature)
            if len(users) > 0:
                index = to_device(users, self._device)
                change(work, index, rows.select(users, index))
        if (features & Feature.PROCESSORS).any():
            errors = self._processors.run(work, rows, self._tokens.token_ids)
        users = np.flatnonzero(features & Feature.PENALTIES)
        if len(users) > 0:
            index = to_device(users, self._device)
            self._penalize(work, index, rows.select(users, index))
        return errors

    def _keep_allowed(self, work: Tensor, index: Tensor, users: SamplingRows) -> None:
        ids = self._params.allowed_ids.take(users.host_slots)
        allowed = reference.token_counts(ids, ids >= 0, self._vocab_size) > 0
        work[index] = work[index].masked_fill_(~allowed, NEG_INF)

    def _ban_stops(self, work: Tensor, index: Tensor, users: SamplingRows) -> None:
        num_outputs = users.positions - self._tokens.num_prompt_tokens[users.slots]
        too_early = num_outputs < self._params.min_tokens(users.slots)
        ids = self._params.stop_ids.take(users.host_slots)
        self._ban(work, index, ids, too_early[:, None])

    def _ban_words(self, work: Tensor, index: Tensor, users: SamplingRows) -> None:
        starts = self._params.bad_word_starts.take(users.host_slots)  # [n, words, length]
        ends = self._params.bad_word_ends.take(users.host_slots)  # [n, words]
        back = torch.arange(1, starts.shape[2] + 1, device=self._device)
        columns = users.positions[:, None] - back
        tails = self._tokens.token_ids[users.slots[:, None], columns.clamp(min=0)]
        tails = tails.masked_fill(columns < 0, -2)  # no word matches before the first token
        self._ban(work, index, ends, reference.match_words(tails, starts))

    def _ban(self, work: Tensor, index: Tensor, ids: Tensor, banned: Tensor) -> None:
        """Ban token ids, [n, width] with padding, where `banned` (broadcast) is true."""
        values = torch.zeros_like(ids, dtype=torch.float32)
        values.masked_fill_(banned & (ids >= 0), NEG_INF)
        reference.add_at(work, index, ids.clamp(min=0), values)

    def _add_bias(self, work: Tensor, index: Tensor, users: SamplingRows) -> None:
        ids = self._params.bias_ids.take(users.host_slots)
        reference.add_at(work, index, ids, self._params.bias_values.take(users.host_slots))

    def _penalize(self, work: Tensor, index: Tensor, users: SamplingRows) -> None:
        columns = torch.arange(users.max_position, device=self._device)
        tokens = self._tokens.token_ids[users.slots, : users.max_position]
        is_prompt = columns < self._tokens.num_prompt_tokens[users.slots, None]
        is_output = ~is_prompt & (columns < users.positions[:, None])
        reference.apply_penalties(
            work, index, tokens, is_prompt, is_output, *self._params.penalties(users.slots)
        )

    def _logprobs(
        self, logits: Tensor, tokens: Tensor, rows: SamplingRows, features: NDArray[np.int64]
    ) -> RowLogprobs | None:
        users = np.flatnonzero(features & Feature.LOGPROBS)
        if len(users) == 0:
            return None
        counts = self._params.num_logprobs[rows.host_slots[users]]
        slots = rows.slots
        if len(users) < len(rows):
            index = to_device(users, self._device)
            logits, tokens, slots = logits[index], tokens[index], slots[index]
        if self._logprobs_mode in PROCESSED:
            logits = reference.processed_logits(logits, slots, *self._params.device_tables)
        is_normal = self._logprobs_mode in ("raw_logprobs", "processed_logprobs")
        is_named = (features[users] & Feature.NAMED_LOGPROBS) != 0
        if not is_named.any():
            values = reference.top_logprobs(logits, tokens, int(counts.max()), normalize=is_normal)
            return RowLogprobs(users, counts, values)
        own = np.flatnonzero(is_named)
        ids = self._params.logprob_ids.take(rows.host_slots[users[own]])
        named = (to_device(own, self._device), ids)
        num_top = int(counts[~is_named].max(initial=0))
        values = reference.top_logprobs(logits, tokens, num_top, named, is_normal)
        return RowLogprobs(users, counts, values)
