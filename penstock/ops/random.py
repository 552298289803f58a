"""Philox4x32-10: randomness as a pure function of (seed, position, token, purpose).

The layout below is a contract. Every implementation of the sampler, in whatever language, must
produce the same bits from it:

    key     = (seed & 0xffffffff, seed >> 32)              the request's unsigned 64-bit seed
    counter = (position & 0xffffffff, position >> 32,      absolute position of the sampled token
               token_id // 4,
               purpose)                                    0 is sampling, see `Purpose`
    words   = philox4x32_10(counter, key)                  four unsigned 32-bit words
    x       = words[token_id % 4]                          one call serves four tokens
    u       = (float32(x >> 9) + 0.5) * 2**-23             in [2**-24, 1 - 2**-24], exact
    gumbel  = -log(-log(u))                                `exact.log`, at most MAX_GUMBEL

Nothing else enters: not the batch, not the row, not the step. Words are held in int64 tensors, as
torch has no arithmetic on unsigned 32-bit integers.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from penstock.ops import exact

NUM_ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF
TOKENS_PER_CALL = 4
MAX_GUMBEL = 16.64
"""An upper bound of the noise: u <= 1 - 2**-24 gives 16.6356; the rest is room for rounding."""


class Purpose(enum.IntEnum):
    """What the noise is for. Different purposes never share noise."""

    SAMPLING = 0


def signed_seed(seed: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit seed."""
    assert 0 <= seed < 2**64, f"a seed has 64 bits and no sign, got {seed}"
    return seed - 2**64 if seed >= 2**63 else seed


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Ten rounds of Philox4x32 on words held in int64.

    counter: [4, *shape], key: [2, *shape or broadcastable to it]; returns [4, *shape].
    """
    ones = [1] * (counter.dim() - 1)
    multipliers = _pair(MULTIPLIERS, counter.device).view(2, *ones)
    increments = _pair(KEY_INCREMENTS, counter.device).view(2, *ones)
    # One operation does both multiplications of a round: words 0 and 2 are multiplied, words 1 and
    # 3 only mixed in. Products wrap at 64 bits, so their low 64 bits are right. `mixed` and `key`
    # keep bits above the word; the next mask removes them.
    multiplied, mixed = counter[0::2], counter[1::2]  # [2, *shape]
    for _ in range(NUM_ROUNDS):
        product = (multiplied * multipliers).flip(0)
        multiplied = (product >> 32).bitwise_xor_(mixed).bitwise_xor_(key).bitwise_and_(WORD)
        mixed = product
        key = key + increments
    return torch.stack((multiplied, mixed & WORD), dim=1).flatten(0, 1)


def _pair(values: tuple[int, int], device: torch.device) -> Tensor:
    """Two constants, filled in on the device: a copy from the host would synchronize."""
    pair = torch.full((2,), values[0], dtype=torch.int64, device=device)
    pair[1] = values[1]
    return pair


def random_words(
    seeds: Tensor, positions: Tensor, groups: Tensor, purpose: Purpose = Purpose.SAMPLING
) -> Tensor:
    """Four words for each four consecutive tokens (`token_id // 4`).

    groups: int64 of any shape. seeds, positions: the same number of dimensions, broadcast to it.
    Returns [4, *shape].
    """
    key = torch.stack((seeds & WORD, (seeds >> 32) & WORD))
    counter = torch.empty((4, *groups.shape), dtype=torch.int64, device=groups.device)
    counter[0] = positions & WORD
    counter[1] = (positions >> 32) & WORD
    counter[2] = groups
    counter[3] = int(purpose)
    return philox4x32(counter, key)


def uniform(words: Tensor) -> Tensor:
    """float32 strictly between 0 and 1, from the upper 23 bits of each word."""
    return ((words >> 9).to(torch.float32) + 0.5) * 2.0**-23


def gumbel(words: Tensor) -> Tensor:
    """Standard Gumbel noise: argmax(logits + gumbel) is distributed as softmax(logits)."""
    return exact.log(exact.log(uniform(words)).neg_()).neg_()


def gumbel_of_tokens(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """The noise of the given tokens.

    seeds, positions: [rows]; token_ids: [rows, n] -> [rows, n].
    """
    groups = token_ids // TOKENS_PER_CALL
    words = random_words(seeds[:, None], positions[:, None], groups)  # [4, rows, n]
    lanes = (token_ids % TOKENS_PER_CALL)[None]
    return gumbel(words.gather(0, lanes)[0])


def gumbel_of_groups(seeds: Tensor, positions: Tensor, groups: Tensor) -> Tensor:
    """The noise of each four consecutive tokens; arguments as for `random_words`: [*shape, 4]."""
    return gumbel(random_words(seeds, positions, groups)).movedim(0, -1)
