"""The sampler: from a step's logits to one token a row, each row as its request asks.

Per row, in this order (vLLM's, with its raw logprobs):

1. log-probabilities, from the logits as the model gave them;
2. masks: grammar, allowed_token_ids, min_tokens, bad_words; then logit_bias;
3. custom processors;
4. repetition, then frequency and presence penalty;
5. greedy: the most likely token, the lowest id of equals;
   otherwise temperature, min_p, top_k, top_p, and a draw with the request's own noise.

A row's result is a function of its logits, its request and its position. Nothing is remembered
between steps: counts for penalties come from the token table each time, so a request that was
preempted, replayed or is checked several positions at once gets the same tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.ops import sampling as reference
from penstock.ops import sampling_cpu
from penstock.ops.sampling import NEG_INF, TopLogprobs
from penstock.protocol.step import NewRequest, TokenLogprobs
from penstock.runner.logits_processors import LogitsProcessor, ProcessorRows
from penstock.runner.sampling_tables import Feature, SamplingTables, to_device

logger = logging.getLogger(__name__)

CHANGES = ~int(Feature.RANDOM | Feature.TRUNCATION | Feature.LOGPROBS)
"""Features that change logits before the draw."""


ChooseTokens = Callable[..., tuple[Tensor, Tensor]]
"""An op that chooses for greedy and drawing rows alike, see `penstock.ops.cpu.sampling`."""


class TokenTables(Protocol):
    """What the sampler reads of the runner's tables, by slot."""

    @property
    def token_ids(self) -> Tensor: ...  # [max_num_seqs, max_model_len] int32: prompt, then output

    @property
    def num_prompt_tokens(self) -> Tensor: ...  # [max_num_seqs] int32


@dataclass(frozen=True)
class SamplingRows:
    """Which request and position each row of logits belongs to.

    The tokens before a row are `token_ids[slot, :position]`. A slot may have several rows.
    """

    slots: Tensor  # [rows] int64, on the device
    positions: Tensor  # [rows] int64, on the device: where the token to be sampled will stand
    host_slots: NDArray[np.int64]  # [rows], the same as slots
    max_position: int  # no position exceeds it

    def __len__(self) -> int:
        return len(self.host_slots)

    def select(self, host_index: NDArray[np.int64], index: Tensor) -> SamplingRows:
        """Some of the rows; both arguments hold the same row numbers."""
        return SamplingRows(
            self.slots[index], self.positions[index], self.host_slots[host_index], self.max_position
        )


@dataclass(frozen=True)
class RowLogprobs:
    """Log-probabilities for the rows that asked for them."""

    rows: NDArray[np.int64]  # [n] which rows
    counts: NDArray[np.int64]  # [n] how many top tokens each asked for
    values: TopLogprobs  # of n rows, with the most that any asked for


@dataclass(frozen=True)
class SampledTokens:
    """A step's tokens, still on the device."""

    token_ids: Tensor  # [rows] int64; 0 where faulted
    faulted: Tensor  # [rows] bool: NaN or +inf among the logits, none left to choose, or `errors`
    errors: dict[int, str] = field(default_factory=dict)  # by row: what a custom processor raised
    logprobs: RowLogprobs | None = None

    def to_host(self) -> SampledTokens:
        """Start the copy to the host; on an accelerator it is complete after a synchronization."""
        logprobs = self.logprobs
        if logprobs is not None:
            logprobs = RowLogprobs(logprobs.rows, logprobs.counts, logprobs.values.to_host())
        return SampledTokens(
            self.token_ids.to("cpu", non_blocking=True),
            self.faulted.to("cpu", non_blocking=True),
            self.errors,
            logprobs,
        )


@dataclass(frozen=True)
class SamplingKind:
    """What some rows ask of the choice itself, where nothing changes their logits before."""

    draws: bool  # whether any row has a temperature
    truncates: bool  # whether any row has top_k, top_p or min_p


class Sampler:
    """Holds the sampling parameters of the requests in the runner's slots and samples for them."""

    def __init__(
        self,
        tables: TokenTables,
        vocab_size: int,
        device: torch.device | str,
        processors: Sequence[LogitsProcessor] = (),
        choose_tokens: ChooseTokens | None = None,
    ) -> None:
        num_slots = tables.token_ids.shape[0]
        self._tokens = tables
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._params = SamplingTables(num_slots, vocab_size, self._device)
        self._choose = choose_tokens
        self._takes_bits = self._device.type == "cpu"  # whether that op takes masks of bits
        self._draw = sampling_cpu.draw if self._device.type == "cpu" else reference.draw
        self._processors = tuple(processors)
        self._handled = np.zeros((len(self._processors), num_slots), dtype=bool)
        self._slot_errors: dict[int, str] = {}  # requests that a processor refused

    def add(self, slot: int, request: NewRequest) -> None:
        """A request enters an empty slot."""
        self._params.add(slot, request)
        for number, processor in enumerate(self._processors):
            try:
                handled = processor.add(slot, request)
                if not isinstance(handled, bool):
                    raise TypeError(f"add must return True or False, got {handled!r}")
            except Exception as error:  # a plugin may raise anything: only its request fails
                logger.exception("logits processor refused request %s", request.request_id)
                self._slot_errors[slot] = _describe(processor, error)
                continue
            if handled:
                self._handled[number, slot] = True
                self._params.features[slot] |= Feature.PROCESSORS

    def remove(self, slot: int) -> None:
        """The request in a slot leaves it. An empty slot stays empty."""
        for number in np.flatnonzero(self._handled[:, slot]):
            try:
                self._processors[number].remove(slot)
            except Exception:  # a plugin may raise anything; the slot is left all the same
                logger.exception("logits processor failed to remove slot %d", slot)
        self._handled[:, slot] = False
        self._slot_errors.pop(slot, None)
        self._params.remove(slot)

    def needs_tokens(self, host_slots: NDArray[np.int64]) -> bool:
        """Whether a processor of one of these requests needs the tokens so far on the host."""
        return any(
            processor.needs_tokens and bool(self._handled[number, host_slots].any())
            for number, processor in enumerate(self._processors)
        )

    def wants_logprobs(self, rows: SamplingRows) -> bool:
        """Whether any of these rows is asked for log-probabilities: of logits as they came."""
        return bool((self._params.features[rows.host_slots] & Feature.LOGPROBS).any())

    def kind_of(self, rows: SamplingRows) -> SamplingKind | None:
        """What `choose` has to do for these rows; None where that is not all there is to do."""
        used = int(np.bitwise_or.reduce(self._params.features[rows.host_slots]))
        if used & CHANGES or self._slot_errors:
            return None
        return SamplingKind(bool(used & Feature.RANDOM), bool(used & Feature.TRUNCATION))

    def choose(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        kind: SamplingKind,
        **options: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Tokens and faults [rows] of logits that are as they should be, by the device's op."""
        assert self._choose is not None
        floats, ints = self._params.device_tables
        return self._choose(
            logits, slots, positions, floats, ints,
            draws=kind.draws, truncates=kind.truncates, **options,
        )  # fmt: skip

    def with_logprobs(
        self, logits: Tensor, tokens: Tensor, faulted: Tensor, rows: SamplingRows
    ) -> SampledTokens:
        """Tokens that were chosen from logits which nothing changed."""
        features = self._params.features[rows.host_slots]
        return SampledTokens(tokens, faulted, {}, self._logprobs(logits, tokens, rows, features))

    def sample(
        self, logits: Tensor, rows: SamplingRows, masks: Tensor | None = None
    ) -> SampledTokens:
        """One token for each row of logits, [rows, vocab], which are left as they are.

        masks: allowed tokens, bool [rows, vocab] or int32 bits [rows, ceil(vocab / 32)].
        """
        features = self._params.features[rows.host_slots]
        if self._choose is not None:
            return self._sample_with_op(logits, rows, features, masks)
        busy = (
            np.flatnonzero(features & ~int(Feature.LOGPROBS))
            if masks is None
            else np.arange(len(rows))
        )
        errors: dict[int, str] = {}
        if len(busy) == 0:
            best, tokens = logits.max(-1)
            faulted = ~torch.isfinite(best)
        elif len(busy) == len(rows):
            faulted = ~torch.isfinite(logits.amax(-1))
            changed = masks is not None or bool((features & CHANGES).any())
            work = logits.to(torch.float32, copy=changed)
            tokens, failed, errors = self._sample_busy(work, rows, features, masks)
            faulted |= failed
        else:
            best, tokens = logits.max(-1)
            faulted = ~torch.isfinite(best)
            index = to_device(busy, self._device)
            work = logits[index].to(torch.float32)
            some, failed, busy_errors = self._sample_busy(
                work, rows.select(busy, index), features[busy], None
            )
            tokens[index] = some
            faulted[index] |= failed
            errors = {int(busy[row]): error for row, error in busy_errors.items()}
        tokens, faulted = self._fail_rows(tokens, faulted, errors, rows)
        tokens = tokens.masked_fill(faulted, 0)
        return SampledTokens(
            tokens, faulted, errors, self._logprobs(logits, tokens, rows, features)
        )

    def _sample_with_op(
        self,
        logits: Tensor,
        rows: SamplingRows,
        features: NDArray[np.int64],
        masks: Tensor | None,
    ) -> SampledTokens:
        """The same, where one op chooses for greedy and drawing rows alike."""
        used = int(np.bitwise_or.reduce(features)) if len(features) else 0
        options: dict[str, Tensor] = {}
        bits = self._takes_bits and not used & CHANGES  # where more changes, masks come first
        if masks is not None and masks.dtype == torch.int32 and bits:
            options["allowed"], masks = masks, None
        changed = masks is not None or bool(used & CHANGES)
        work, errors = logits, {}
        if changed:
            work = logits.to(torch.float32, copy=True)
            errors = self._change_logits(work, rows, features, masks)
        kind = SamplingKind(bool(used & Feature.RANDOM), bool(used & Feature.TRUNCATION))
        tokens, faulted = self.choose(work, rows.slots, rows.positions, kind, **options)
        if changed:
            faulted |= ~torch.isfinite(logits.amax(-1))
        if errors or self._slot_errors or changed:
            tokens, faulted = self._fail_rows(tokens, faulted, errors, rows)
            tokens = tokens.masked_fill(faulted, 0)
        return SampledTokens(
            tokens, faulted, errors, self._logprobs(logits, tokens, rows, features)
        )

    def _fail_rows(
        self, tokens: Tensor, faulted: Tensor, errors: dict[int, str], rows: SamplingRows
    ) -> tuple[Tensor, Tensor]:
        """Mark rows that a processor refused or failed for, in `errors` too."""
        if self._slot_errors:
            for row, slot in enumerate(rows.host_slots):
                if slot in self._slot_errors:
                    errors[row] = self._slot_errors[slot]
        if errors:
            faulted[to_device(np.array(list(errors)), self._device)] = True
        return tokens, faulted

    def _sample_busy(
        self, work: Tensor, rows: SamplingRows, features: NDArray[np.int64], masks: Tensor | None
    ) -> tuple[Tensor, Tensor, dict[int, str]]:
        """Tokens, faults and errors of rows that need more than an argmax; may change `work`."""
        errors = self._change_logits(work, rows, features, masks)
        random = np.flatnonzero(features & Feature.RANDOM)
        if len(random) == len(rows):
            best = work.amax(-1)
            tokens = self._draw_tokens(work, best, rows, features)
        else:
            best, tokens = work.max(-1)
            if len(random) > 0:
                index = to_device(random, self._device)
                tokens[index] = self._draw_tokens(
                    work[index], best[index], rows.select(random, index), features[random]
                )
        return tokens, ~torch.isfinite(best), errors

    def _draw_tokens(
        self, work: Tensor, best: Tensor, rows: SamplingRows, features: NDArray[np.int64]
    ) -> Tensor:
        params = self._params
        truncates = bool((features & Feature.TRUNCATION).any())
        return self._draw(
            reference.scale_logits(work, best, params.temperature(rows.slots)),
            params.truncation(rows.slots) if truncates else None,
            params.seeds(rows.slots),
            rows.positions,
        )

    def _change_logits(
        self, work: Tensor, rows: SamplingRows, features: NDArray[np.int64], masks: Tensor | None
    ) -> dict[int, str]:
        """Steps 2 to 4 in place, each for the rows that use it."""
        if masks is not None:
            if masks.dtype != torch.bool:
                masks = reference.unpack_bitmask(masks, self._vocab_size)
            work.masked_fill_(~masks, NEG_INF)
        errors: dict[int, str] = {}
        if not (features & CHANGES).any():
            return errors
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
            errors = self._run_processors(work, rows)
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
        tails = tails.masked_fill(columns < 0, -2)  # before the first token nothing matches
        self._ban(work, index, ends, reference.match_words(tails, starts))

    def _ban(self, work: Tensor, index: Tensor, ids: Tensor, banned: Tensor) -> None:
        """Ban token ids, [n, width] with padding, where `banned`, which broadcasts, holds."""
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

    def _run_processors(self, work: Tensor, rows: SamplingRows) -> dict[int, str]:
        errors: dict[int, str] = {}
        for number, processor in enumerate(self._processors):
            users = np.flatnonzero(self._handled[number, rows.host_slots])
            if len(users) == 0:
                continue
            index = to_device(users, self._device)
            try:
                work[index] = self._process(processor, work, rows, users)
            except Exception:  # a plugin may raise anything: find out which rows it fails for
                for user in users:
                    row = np.array([user])
                    try:
                        work[int(user)] = self._process(processor, work, rows, row)[0]
                    except Exception as error:
                        logger.exception("logits processor failed")
                        errors[int(user)] = _describe(processor, error)
        return errors

    def _process(
        self,
        processor: LogitsProcessor,
        work: Tensor,
        rows: SamplingRows,
        users: NDArray[np.int64],
    ) -> Tensor:
        """A processor's logits for some rows. It works on a copy: what it raises harms nothing."""
        index = to_device(users, self._device)
        chosen = rows.select(users, index)
        token_ids = self._history(chosen) if processor.needs_tokens else None
        given = work[index]
        result = processor.apply(
            given, ProcessorRows(chosen.slots, chosen.positions, chosen.host_slots, token_ids)
        )
        if not isinstance(result, Tensor) or result.shape != given.shape:
            raise TypeError(
                f"apply must return a tensor of shape {tuple(given.shape)}, "
                f"got {getattr(result, 'shape', result)!r}"
            )
        return result.to(device=work.device, dtype=work.dtype)

    def _history(self, rows: SamplingRows) -> list[list[int]]:
        tokens = self._tokens.token_ids[rows.slots, : rows.max_position].tolist()
        return [row[:end] for row, end in zip(tokens, rows.positions.tolist(), strict=True)]

    def _logprobs(
        self, logits: Tensor, tokens: Tensor, rows: SamplingRows, features: NDArray[np.int64]
    ) -> RowLogprobs | None:
        users = np.flatnonzero(features & Feature.LOGPROBS)
        if len(users) == 0:
            return None
        counts = self._params.num_logprobs[rows.host_slots[users]]
        if len(users) < len(rows):
            index = to_device(users, self._device)
            logits, tokens = logits[index], tokens[index]
        values = reference.top_logprobs(logits, tokens, int(counts.max()))
        return RowLogprobs(users, counts, values)


def prompt_logprobs(logits: Tensor, target_token_ids: Tensor, k: int) -> TopLogprobs:
    """Log-probabilities of prompt tokens: row i of logits, [n, vocab], predicts target i.

    k top tokens besides; -1: all. Memory grows with n * vocab: the caller chooses n.
    """
    return reference.top_logprobs(logits, target_token_ids, logits.shape[1] if k < 0 else k)


def token_logprobs(values: TopLogprobs, counts: Sequence[int]) -> list[TokenLogprobs]:
    """One `TokenLogprobs` a row of host tensors: the token itself, then its row's top `count`."""
    return [
        TokenLogprobs([token_id, *ids[:count]], [logprob, *logprobs[:count]], rank)
        for token_id, logprob, rank, ids, logprobs, count in zip(
            values.token_ids.tolist(),
            values.logprobs.tolist(),
            values.ranks.tolist(),
            values.top_ids.tolist(),
            values.top_logprobs.tolist(),
            counts,
            strict=True,
        )
    ]


def row_logprobs(sampled: SampledTokens) -> dict[int, TokenLogprobs]:
    """By row, for the rows that asked. `sampled` must have arrived on the host."""
    if sampled.logprobs is None:
        return {}
    lists = token_logprobs(sampled.logprobs.values, sampled.logprobs.counts.tolist())
    return dict(zip(sampled.logprobs.rows.tolist(), lists, strict=True))


def _describe(processor: LogitsProcessor, error: Exception) -> str:
    return f"logits processor {type(processor).__name__} failed: {error!r}"
