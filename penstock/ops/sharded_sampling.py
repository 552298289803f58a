"""Chooses tokens from logits that are sharded over the vocabulary, without gathering them.

Each rank looks at its own tokens. Ranks exchange the best logit of each row, then the top of it if
rows truncate, then the winner of the draw: a few numbers per row each time. Noise depends on the
token ID (`penstock.ops.random`), and what is exchanged decides the rest. So all ranks choose the
token that one rank with all logits would choose, bit for bit.

The four ops at the end are what a device may implement faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.ops.random import TOKENS_PER_CALL, gumbel_of_groups
from penstock.ops.registry import Ops
from penstock.ops.sampling import (
    GREEDY,
    NEG_INF,
    nucleus_limit,
    scale_logits,
    token_mass,
    unpack_bitmask,
)

MAX_TOP_K = 64
"""Rows with a larger top_k, or with top_p and no top_k, need all logits of the row."""

Gather = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class VocabShard:
    """The tokens of this rank: `num_tokens` from `first` on. A rank has at least one.

    `gather` stacks the tensors of all ranks, in rank order: [*shape] -> [ranks, *shape].
    """

    first: int
    num_tokens: int
    width: int  # columns of every rank's logits; those behind its tokens are padding
    vocab_size: int
    gather: Gather
    ops: Ops

    def choose_tokens(
        self,
        logits: Tensor,  # [rows, width], any floating-point type
        slots: Tensor,  # this and others as for `penstock.ops.sampling.choose_tokens`
        positions: Tensor,
        floats: Tensor,
        ints: Tensor,
        *,
        allowed: Tensor | None = None,
        draws: bool = True,
        truncates: bool = True,  # with a top_k of at most MAX_TOP_K, or min_p alone
    ) -> tuple[Tensor, Tensor]:
        """Token [rows] int64 and fault [rows] bool of each row, the same on all ranks."""
        own, ops = logits[:, : self.num_tokens], self.ops
        best, index = ops.best_of_share(own)
        if allowed is not None:
            usable = best < float("inf")  # neither NaN nor infinity
            is_allowed = unpack_bitmask(allowed, self.vocab_size)
            is_allowed = is_allowed[:, self.first : self.first + self.num_tokens]
            own = own.masked_fill(~is_allowed, NEG_INF)
            left, index = ops.best_of_share(own)
            best = torch.where(usable, left, float("nan"))
        best, tokens = self._winners(best, index)
        if draws:
            cutoff = None
            if truncates:
                tops = self.gather(ops.top_of_share(own, best, slots, floats, MAX_TOP_K))
                cutoff = ops.shared_cutoff(tops.movedim(0, 1), slots, floats, ints, self.vocab_size)
            scores, index = ops.draw_from_share(
                own, best, cutoff, slots, positions, floats, ints, self.first
            )
            _, drawn = self._winners(scores, index)
            tokens = torch.where(floats[slots, 0] > GREEDY, drawn, tokens)
        faulted = ~torch.isfinite(best)
        return tokens.masked_fill(faulted, 0), faulted

    def _winners(self, values: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """The largest value over all ranks and its token, both [rows]; NaN if any rank has NaN.

        Ties go to the lower rank, which has the lower tokens.
        """
        ids = (index + self.first).to(torch.int32)
        gathered = self.gather(torch.stack((values.view(torch.int32), ids)))  # [ranks, 2, rows]
        best, rank = gathered[:, 0].view(torch.float32).max(0)
        return best, gathered[:, 1].gather(0, rank[None])[0].to(torch.int64)

    def whole(self, logits: Tensor) -> Tensor:
        """This rank's logits [rows, width] -> those of all tokens, [rows, vocab_size]."""
        parts = self.gather(logits)
        return torch.cat(parts.unbind(0), dim=-1)[:, : self.vocab_size]


def best_of_share(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row in float32, and its column. NaN if there is one."""
    best, index = logits.max(-1)
    return best.float(), index


def top_of_share(logits: Tensor, best: Tensor, slots: Tensor, floats: Tensor, k: int) -> Tensor:
    """The k largest scaled logits of each row, descending, and how many more equal the last.

    [rows, k + 1] float32; a row with fewer than k is padded with -inf. `best`: of all ranks.
    """
    scaled = scale_logits(logits.float(), best, floats[slots, 0])
    num = min(k, scaled.shape[1])
    top = scaled.topk(num, dim=-1).values
    more = (scaled >= top[:, -1:]).sum(-1) - num
    padded = torch.nn.functional.pad(top, (0, k - num), value=NEG_INF)
    return torch.cat((padded, more[:, None].to(torch.float32)), dim=-1)


def shared_cutoff(
    tops: Tensor,  # [rows, ranks, k + 1]: `top_of_share` of all ranks
    slots: Tensor,
    floats: Tensor,
    ints: Tensor,
    vocab_size: int,
) -> Tensor:
    """`penstock.ops.sampling.truncation_cutoff` of the whole row. [rows]

    A rank's tokens at or above the row's k-th value are in its top, except for ties with that
    value: a rank whose last value is larger would have more than k tokens above it.
    """
    top, more = tops[..., :-1], tops[..., -1]
    last = top.flatten(1).sort(dim=-1, descending=True).values
    top_k, top_p = ints[slots, 0], floats[slots, 2]
    kth = last.gather(1, (top_k.clamp(max=top.shape[-1]) - 1)[:, None])[:, 0]
    kth = kth.masked_fill(top_k >= vocab_size, NEG_INF)
    floor = torch.maximum(kth, floats[slots, 1])
    survives = last >= floor[:, None]
    mass = token_mass(last).masked_fill_(~survives, 0)
    running = mass.cumsum(-1, dtype=torch.float64)
    ties = more.masked_fill(top[..., -1] != kth[:, None], 0).sum(-1, dtype=torch.float64)
    ties = ties.masked_fill(kth < floor, 0)
    total = running[:, -1] + ties * token_mass(kth)
    survives &= (running - mass) < nucleus_limit(total, top_p)[:, None]
    nucleus = last.masked_fill(~survives, float("inf")).amin(-1)
    return torch.where(top_p < 1.0, nucleus, floor)


def draw_from_share(
    logits: Tensor,
    best: Tensor,  # [rows], of all ranks
    cutoff: Tensor | None,  # [rows]
    slots: Tensor,
    positions: Tensor,
    floats: Tensor,
    ints: Tensor,
    first: int,  # the token of the first column
) -> tuple[Tensor, Tensor]:
    """The largest of scaled logit plus noise in each row, and its column.

    Rows that do not draw, or have NaN, give anything but NaN.
    """
    num_rows, num_tokens = logits.shape
    scaled = scale_logits(logits.float(), best, floats[slots, 0])
    start = first // TOKENS_PER_CALL
    end = -(-(first + num_tokens) // TOKENS_PER_CALL)
    groups = torch.arange(start, end, device=logits.device).expand(num_rows, -1)
    noise = gumbel_of_groups(ints[slots, 1, None], positions[:, None], groups).flatten(1)
    shift = first - start * TOKENS_PER_CALL
    scores = scaled + noise[:, shift : shift + num_tokens]
    if cutoff is not None:
        scores.masked_fill_(scaled < cutoff[:, None], NEG_INF)
    return scores.nan_to_num_(nan=NEG_INF, posinf=NEG_INF, neginf=NEG_INF).max(-1)
