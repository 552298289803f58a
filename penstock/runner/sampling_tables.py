"""The sampler's state of each request, by slot: parameters and token lists.

Fixed-size parameters are in device tables with one row per slot. Lists (logit_bias,
allowed_token_ids, stop tokens, bad words) are in padded tables, with rows only for the requests
that use them. Flags on the host tell which features a step uses, without asking the device.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.ops.random import signed_seed
from penstock.ops.sampling import GREEDY, SMALLEST_FLOAT32
from penstock.ops.sharded_sampling import MAX_TOP_K
from penstock.protocol.step import NewRequest

HostArray = NDArray[Any]
PADDING = -1


class Feature(enum.IntFlag):
    """The sampler features of a request. No flag: plain greedy."""

    RANDOM = enum.auto()
    TRUNCATION = enum.auto()
    PENALTIES = enum.auto()
    ALLOWED_TOKENS = enum.auto()
    MIN_TOKENS = enum.auto()
    BAD_WORDS = enum.auto()
    LOGIT_BIAS = enum.auto()
    PROCESSORS = enum.auto()
    LOGPROBS = enum.auto()
    NAMED_LOGPROBS = enum.auto()  # of tokens that the request lists
    WHOLE_ROWS = enum.auto()  # truncation that needs all logits of a row


def to_device(values: HostArray, device: torch.device) -> Tensor:
    """A copy on the device, without a wait on the host."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


class PaddedTable:
    """Arrays of different sizes, at most one per slot, padded to a common size.

    The table has one row per slot that uses it and is as wide as its widest array so far. It frees
    its memory when the last user leaves.
    """

    def __init__(
        self,
        num_slots: int,
        num_dims: int,
        dtype: torch.dtype,
        padding: float,
        device: torch.device,
    ) -> None:
        self._padding = padding
        self._device = device
        self._num_dims = num_dims
        self._empty = torch.empty((0,) * (num_dims + 1), dtype=dtype, device=device)
        self._data = self._empty  # [users, *sizes]
        self._row_of_slot = np.full(num_slots, -1, dtype=np.int64)
        self._sizes = np.zeros((num_slots, num_dims), dtype=np.int64)
        self._free_rows: list[int] = []

    def put(self, slot: int, values: HostArray) -> None:
        """Store an array of `num_dims` dimensions for a slot that has none."""
        assert values.ndim == self._num_dims
        assert self._row_of_slot[slot] < 0, f"slot {slot} is taken"
        self._reserve(values.shape)
        row = self._free_rows.pop()
        self._row_of_slot[slot] = row
        self._sizes[slot] = values.shape
        self._data[row].fill_(self._padding)
        target = self._data[row][_corner(values.shape)]
        target.copy_(to_device(values, self._device), non_blocking=True)

    def drop(self, slot: int) -> None:
        """Remove a slot's array, if it has one."""
        row = int(self._row_of_slot[slot])
        if row < 0:
            return
        self._row_of_slot[slot] = -1
        self._free_rows.append(row)
        if len(self._free_rows) == self._data.shape[0]:
            self._data = self._empty
            self._free_rows = []

    def take(self, host_slots: HostArray) -> Tensor:
        """The arrays of these slots, padded to the largest of them. [n, *sizes]"""
        rows = self._row_of_slot[host_slots]
        assert (rows >= 0).all(), "a slot without an entry was asked for"
        sizes = self._sizes[host_slots].max(axis=0)
        corner = (slice(None), *_corner(sizes))
        used = self._data[corner]
        return used[to_device(rows, self._device)]

    def _reserve(self, sizes: Sequence[int]) -> None:
        """Make room for one more array of these sizes. Rows and sizes at least double."""
        old = self._data.shape
        wanted = (old[0] if self._free_rows else old[0] + 1, *sizes)
        if all(need <= have for need, have in zip(wanted, old, strict=True)):
            return
        shape = [
            have if need <= have else max(need, 2 * have)
            for need, have in zip(wanted, old, strict=True)
        ]
        grown = torch.full(shape, self._padding, dtype=self._data.dtype, device=self._device)
        grown[_corner(old)] = self._data
        self._free_rows.extend(range(old[0], shape[0]))
        self._data = grown


def _corner(sizes: Iterable[int]) -> tuple[slice, ...]:
    """The index of the first `size` entries along each dimension."""
    return tuple(slice(int(size)) for size in sizes)


class SamplingTables:
    """The sampler's state of every slot."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.features = np.zeros(num_slots, dtype=np.int64)  # Feature bits
        self.num_logprobs = np.zeros(num_slots, dtype=np.int64)
        self._floats = torch.zeros((num_slots, 6), dtype=torch.float32, device=device)
        self._ints = torch.zeros((num_slots, 3), dtype=torch.int64, device=device)

        def lists(dtype: torch.dtype, padding: float = PADDING, num_dims: int = 1) -> PaddedTable:
            return PaddedTable(num_slots, num_dims, dtype, padding, device)

        self.allowed_ids = lists(torch.int64)
        self.logprob_ids = lists(torch.int64, padding=0)
        self.stop_ids = lists(torch.int64)
        self.bias_ids = lists(torch.int64, padding=0)
        self.bias_values = lists(torch.float32, padding=0.0)
        self.bad_word_ends = lists(torch.int64)  # [users, words]: a word's last token
        self.bad_word_starts = lists(torch.int64, num_dims=2)  # [users, words, length], reversed

    def add(self, slot: int, request: NewRequest) -> None:
        """Store a request's parameters.

        Token ids outside the vocabulary are dropped: they can be neither produced nor matched.
        """
        params = request.sampling
        features = Feature(0)
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        if not params.is_greedy:
            features |= Feature.RANDOM
            if top_k < self.vocab_size or params.top_p < 1.0 or params.min_p > 0.0:
                features |= Feature.TRUNCATION
                is_long = top_k > MAX_TOP_K and (top_k < self.vocab_size or params.top_p < 1.0)
                if is_long:
                    features |= Feature.WHOLE_ROWS
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        if penalties != (1.0, 0.0, 0.0):
            features |= Feature.PENALTIES
        if params.logprob_token_ids:
            features |= Feature.LOGPROBS | Feature.NAMED_LOGPROBS
            self.logprob_ids.put(slot, np.array(params.logprob_token_ids, dtype=np.int64))
            self.num_logprobs[slot] = len(params.logprob_token_ids)
        elif params.logprobs is not None:
            features |= Feature.LOGPROBS
            asked = self.vocab_size if params.logprobs < 0 else params.logprobs
            self.num_logprobs[slot] = min(asked, self.vocab_size)
        features |= self._add_lists(slot, request)
        floats = (
            max(params.temperature, GREEDY),
            math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
            max(params.top_p, SMALLEST_FLOAT32),
            *penalties,
        )
        ints = (top_k, signed_seed(request.seed), params.min_tokens)
        self._floats[slot] = to_device(np.array(floats, dtype=np.float32), self.device)
        self._ints[slot] = to_device(np.array(ints, dtype=np.int64), self.device)
        self.features[slot] = int(features)

    def remove(self, slot: int) -> None:
        self.features[slot] = 0
        self.num_logprobs[slot] = 0
        for table in (
            self.allowed_ids,
            self.logprob_ids,
            self.stop_ids,
            self.bias_ids,
            self.bias_values,
            self.bad_word_ends,
            self.bad_word_starts,
        ):
            table.drop(slot)

    @property
    def device_tables(self) -> tuple[Tensor, Tensor]:
        """By slot: temperature, log of min_p, top_p, ...; top_k, seed, ..."""
        return self._floats, self._ints

    def penalties(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """repetition, frequency, presence: [n] each."""
        return self._floats[slots, 3], self._floats[slots, 4], self._floats[slots, 5]

    def min_tokens(self, slots: Tensor) -> Tensor:
        return self._ints[slots, 2]

    def _add_lists(self, slot: int, request: NewRequest) -> Feature:
        params = request.sampling
        features = Feature(0)
        if params.allowed_token_ids is not None:
            features |= Feature.ALLOWED_TOKENS
            self.allowed_ids.put(slot, self._token_array(params.allowed_token_ids))
        if params.min_tokens > 0:
            eos = [] if params.ignore_eos else request.eos_token_ids
            stops = self._token_array([*eos, *(params.stop_token_ids or [])])
            if stops.size > 0:
                features |= Feature.MIN_TOKENS
                self.stop_ids.put(slot, stops)
        if params.logit_bias:
            known = {id: bias for id, bias in params.logit_bias.items() if id < self.vocab_size}
            if known:
                features |= Feature.LOGIT_BIAS
                self.bias_ids.put(slot, np.array(list(known), dtype=np.int64))
                self.bias_values.put(slot, np.array(list(known.values()), dtype=np.float32))
        words = [word for word in request.bad_words_token_ids if word and self._knows(word)]
        if words:
            features |= Feature.BAD_WORDS
            starts = np.full(
                (len(words), max(len(word) for word in words) - 1), PADDING, dtype=np.int64
            )
            for index, word in enumerate(words):
                starts[index, : len(word) - 1] = word[-2::-1]
            self.bad_word_ends.put(slot, np.array([word[-1] for word in words], dtype=np.int64))
            self.bad_word_starts.put(slot, starts)
        return features

    def _knows(self, token_ids: Iterable[int]) -> bool:
        return all(0 <= token_id < self.vocab_size for token_id in token_ids)

    def _token_array(self, token_ids: Sequence[int]) -> NDArray[np.int64]:
        known = {token_id for token_id in token_ids if 0 <= token_id < self.vocab_size}
        return np.array(sorted(known), dtype=np.int64)
