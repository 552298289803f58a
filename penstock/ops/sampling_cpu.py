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
    NEG_INF,
    Truncation,
    nucleus_limit,
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
    scores = head + gumbel_of_tokens(seeds, positions, ids)
    scores.masked_fill_(head < cutoff[:, None], NEG_INF)
    best = scores.amax(-1)
    tokens = ids.masked_fill(scores != best[:, None], vocab_size).amin(-1)  # lowest id among ties
    floor = torch.maximum(cutoff, best - MAX_GUMBEL)
    if head.shape[1] < vocab_size:
        rest = (floor <= head[:, -1]).nonzero()[:, 0]  # rows where a token outside could still win
        if rest.numel() > 0:
            tokens[rest] = _argmax_above(scaled[rest], floor[rest], seeds[rest], positions[rest])
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


def _argmax_above(scaled: Tensor, floor: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Gumbel-max over tokens at or above the floor.

    Noise is computed only for quads with such a token.
    """
    num_rows, vocab_size = scaled.shape
    padding = -vocab_size % TOKENS_PER_CALL
    padded = torch.nn.functional.pad(scaled, (0, padding), value=NEG_INF)
    padded = padded.masked_fill_(padded < floor[:, None], NEG_INF)
    grouped = padded.view(num_rows, -1, TOKENS_PER_CALL)
    first, second, third, fourth = (grouped > NEG_INF).unbind(-1)
    rows, groups = (first | second | third | fourth).nonzero(as_tuple=True)
    noise = gumbel_of_groups(seeds[rows], positions[rows], groups)  # [active, 4]
    grouped[rows, groups] += noise  # the other quads hold only -inf
    return padded.argmax(-1)


choose_tokens = functools.partial(sampling.choose_tokens, draw=draw)
