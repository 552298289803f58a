"""Chooses tokens on a CPU in torch like the reference, without sorting or noise for whole rows.

A token's score is its scaled logit plus noise of at most MAX_GUMBEL. Once a token has score s, only
tokens with a scaled logit of at least s - MAX_GUMBEL can still win, if they survive truncation.
Mostly both sets are within the few hundred most likely tokens. Branching on values costs nothing on
a CPU. On an accelerator it would stall, so there the reference is used.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from penstock.ops import sampling
from penstock.ops.random import (
    MAX_GUMBEL,
    TOKENS_PER_CALL,
    gumbel_of_groups,
    gumbel_of_tokens,
)
from penstock.ops.sampling import (
    GREEDY,
    NEG_INF,
    Truncation,
    nucleus_limit,
    scale_logits,
    token_mass,
)

HEAD_SIZE = 512
"""Most likely tokens looked at first. It affects how much work is done, never the result."""

GROWTH = 8
"""How much longer the next head is, for rows whose truncation reaches beyond the first."""


def draw(
    scaled: Tensor,
    truncation: Truncation | None,
    seeds: Tensor,
    positions: Tensor,
    head_size: int = HEAD_SIZE,
) -> Tensor:
    """Like `penstock.ops.sampling.draw`."""
    vocab_size = scaled.shape[1]
    head, ids = scaled.topk(min(head_size, vocab_size), dim=-1)  # [rows, head]
    if truncation is None:
        cutoff = torch.full_like(head[:, 0], NEG_INF)
    else:
        cutoff = _cutoff(scaled, head, truncation)
    return _draw_above(scaled, head, ids, cutoff, seeds, positions)


def draw_from_share(
    logits: Tensor,
    best: Tensor,
    cutoff: Tensor | None,
    slots: Tensor,
    positions: Tensor,
    floats: Tensor,
    ints: Tensor,
    first: int,
) -> tuple[Tensor, Tensor]:
    """Like `penstock.ops.sharded_sampling.draw_from_share`."""
    scores = torch.zeros(len(logits))
    columns = torch.zeros(len(logits), dtype=torch.int64)
    random = ((floats[slots, 0] > GREEDY) & torch.isfinite(best)).nonzero()[:, 0]
    own, at = slots[random], positions[random]
    scaled = scale_logits(logits[random].float(), best[random], floats[own, 0])
    floor = torch.full_like(best[random], NEG_INF) if cutoff is None else cutoff[random]
    head, ids = scaled.topk(min(HEAD_SIZE, scaled.shape[1]), dim=-1)
    drawn = _draw_above(scaled, head, ids, floor, ints[own, 1], at, first)[:, None]
    noise = gumbel_of_tokens(ints[own, 1], at, drawn + first)
    values = scaled.gather(1, drawn)
    values = (values + noise).masked_fill_(values < floor[:, None], NEG_INF)
    scores[random], columns[random] = values[:, 0], drawn[:, 0]
    return scores, columns


def _draw_above(
    scaled: Tensor,
    head: Tensor,  # [rows, n]: the most likely, and their columns:
    ids: Tensor,
    cutoff: Tensor,  # [rows]
    seeds: Tensor,
    positions: Tensor,
    first: int = 0,
) -> Tensor:
    """Gumbel-max over columns at or above the cutoff. Column 0 is the token `first`."""
    vocab_size = scaled.shape[1]
    scores = head + gumbel_of_tokens(seeds, positions, ids + first)
    scores.masked_fill_(head < cutoff[:, None], NEG_INF)
    best = scores.amax(-1)
    tokens = ids.masked_fill(scores != best[:, None], vocab_size).amin(-1)  # lowest id among ties
    floor = torch.maximum(cutoff, best - MAX_GUMBEL)
    if head.shape[1] < vocab_size:
        rest = (floor <= head[:, -1]).nonzero()[:, 0]  # rows where a token outside could still win
        if rest.numel() > 0:
            tokens[rest] = _argmax_above(
                scaled[rest], floor[rest], seeds[rest], positions[rest], first
            )
    return tokens


def _cutoff(scaled: Tensor, head: Tensor, truncation: Truncation) -> Tensor:
    """The reference's cutoff, from the head if that suffices, else from a longer one. [rows]"""
    head_size, vocab_size = head.shape[1], scaled.shape[1]
    has_top_k, has_top_p = truncation.top_k < vocab_size, truncation.top_p < 1.0
    kth = head.gather(1, truncation.top_k.clamp(max=head_size)[:, None] - 1)[:, 0]
    cutoff = torch.maximum(kth.masked_fill(~has_top_k, NEG_INF), truncation.log_min_p)
    unknown = has_top_k & (truncation.top_k > head_size)
    if bool(has_top_p.any()):
        all_mass = token_mass(scaled)
        if bool((cutoff > NEG_INF).any()):
            all_mass.masked_fill_(scaled < cutoff[:, None], 0)
        limit = nucleus_limit(all_mass.to(torch.float64).sum(-1), truncation.top_p)
        mass = token_mass(head).masked_fill_(head < cutoff[:, None], 0)
        before = mass.cumsum(-1, dtype=torch.float64) - mass
        survives = (head >= cutoff[:, None]) & (before < limit[:, None])
        nucleus = head.masked_fill(~survives, float("inf")).amin(-1)
        cutoff = torch.where(has_top_p, nucleus, cutoff)
        unknown |= has_top_p & survives[:, -1]  # the nucleus may reach beyond the head
    if head_size < vocab_size and bool(unknown.any()):
        rows = scaled[unknown]
        longer = rows.topk(min(GROWTH * head_size, vocab_size), dim=-1).values
        cutoff[unknown] = _cutoff(rows, longer, truncation[unknown])
    return cutoff


def _argmax_above(
    scaled: Tensor, floor: Tensor, seeds: Tensor, positions: Tensor, first: int
) -> Tensor:
    """Gumbel-max over tokens at or above the floor.

    Noise is computed only for quads with such a token.
    """
    num_rows, num_tokens = scaled.shape
    shift = first % TOKENS_PER_CALL
    padding = (shift, -(shift + num_tokens) % TOKENS_PER_CALL)
    padded = torch.nn.functional.pad(scaled, padding, value=NEG_INF)
    padded = padded.masked_fill_(padded < floor[:, None], NEG_INF)
    grouped = padded.view(num_rows, -1, TOKENS_PER_CALL)
    one, two, three, four = (grouped > NEG_INF).unbind(-1)
    rows, groups = (one | two | three | four).nonzero(as_tuple=True)
    noise = gumbel_of_groups(seeds[rows], positions[rows], groups + first // TOKENS_PER_CALL)
    grouped[rows, groups] += noise  # [active, 4]; the other quads hold only -inf
    return (padded.argmax(-1) - shift).clamp_(min=0)


choose_tokens = functools.partial(sampling.choose_tokens, draw=draw)
