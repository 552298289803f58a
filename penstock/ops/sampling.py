"""Sampling in plain torch: the reference that faster implementations are tested against.

A row is one position of one request. Every function treats rows independently, bit for bit: the
result of a row never depends on other rows.

Truncation (min_p, top_k, top_p) is a cutoff: tokens whose scaled logit is at least the cutoff
survive, so ties at the boundary survive together. Probability mass is counted in integers, whose
sum is exact in any order. Therefore sorting the whole row and looking only at its head give the
same cutoff, on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.ops import exact
from penstock.ops.random import TOKENS_PER_CALL, gumbel_of_groups

BEST_MASS = 2.0**34
"""The mass of the most likely token.

Sums of up to 2**19 tokens stay below 2**53: exact in float64.
"""
MAX_CHUNK_ELEMENTS = 2**24
"""Logits that the reference processes at a time, which bounds its temporary memory."""

NEG_INF = float("-inf")
SMALLEST_FLOAT32 = torch.finfo(torch.float32).tiny
LARGEST_FLOAT32 = torch.finfo(torch.float32).max
GREEDY = SMALLEST_FLOAT32
"""The value for temperature 0 in the tables."""


@dataclass(frozen=True)
class Truncation:
    """Which tokens of each row may be drawn."""

    log_min_p: Tensor  # [rows] float32; -inf: off
    top_k: Tensor  # [rows] int64, 1 to vocab_size; vocab_size: off
    top_p: Tensor  # [rows] float32, above 0; 1: off

    def __getitem__(self, index: Tensor | slice) -> Truncation:
        return Truncation(self.log_min_p[index], self.top_k[index], self.top_p[index])


@dataclass(frozen=True)
class TopLogprobs:
    """The log-probability and rank of one token per row, and the row's top or named tokens."""

    token_ids: Tensor  # [rows] int64
    logprobs: Tensor  # [rows] float32
    ranks: Tensor  # [rows] int64; 1 + the number of strictly more likely tokens
    top_ids: Tensor  # [rows, k] int64, most likely first, ties by lower id
    top_logprobs: Tensor  # [rows, k] float32

    def to_host(self) -> TopLogprobs:
        """Start the copy to the host. On an accelerator it is complete after a synchronization."""
        return TopLogprobs(
            self.token_ids.to("cpu", non_blocking=True),
            self.logprobs.to("cpu", non_blocking=True),
            self.ranks.to("cpu", non_blocking=True),
            self.top_ids.to("cpu", non_blocking=True),
            self.top_logprobs.to("cpu", non_blocking=True),
        )


def add_at(logits: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """logits[rows[i], token_ids[i, j]] += values[i, j], in place; -inf bans a token.

    logits: [num_rows, vocab]; rows: [n]; token_ids, values: [n, width]. Repeated ids add up.
    """
    logits.index_put_((rows[:, None], token_ids), values, accumulate=True)


def token_counts(token_ids: Tensor, valid: Tensor, vocab_size: int) -> Tensor:
    """How often each token occurs among the valid ones. [n, width] -> [n, vocab] int32."""
    counts = torch.zeros(
        (token_ids.shape[0], vocab_size), dtype=torch.int32, device=token_ids.device
    )
    index = token_ids.to(torch.int64).masked_fill(~valid, 0)
    return counts.scatter_add_(1, index, valid.to(torch.int32))


def apply_penalties(
    logits: Tensor,  # [num_rows, vocab] float32
    rows: Tensor,  # [n] the rows to penalize
    token_ids: Tensor,  # [n, length] int, the tokens so far; arbitrary outside of both masks:
    is_prompt: Tensor,  # [n, length] bool
    is_output: Tensor,  # [n, length] bool
    repetition: Tensor,  # [n]
    frequency: Tensor,  # [n]
    presence: Tensor,  # [n]
) -> None:
    """Repetition penalty over prompt and output, then frequency and presence over the output.

    Works in place. Only logits of tokens that occur are read and written. A token that occurs
    several times is written several times, with the same value.
    """
    vocab_size = logits.shape[1]
    tokens = token_ids.to(torch.int64).masked_fill(~(is_prompt | is_output), 0)
    in_prompt = token_counts(tokens, is_prompt, vocab_size).gather(1, tokens)  # [n, length]
    in_output = token_counts(tokens, is_output, vocab_size).gather(1, tokens)
    values = logits[rows[:, None], tokens]
    factor = repetition[:, None]
    repeated = torch.where(values > 0, values / factor, values * factor)
    values = torch.where((in_prompt > 0) | (in_output > 0), repeated, values)
    values -= frequency[:, None] * in_output
    values -= presence[:, None] * (in_output > 0)
    logits[rows[:, None], tokens] = values


def match_words(tails: Tensor, prefixes: Tensor) -> Tensor:
    """Which words their last token would complete.

    tails: [n, length], latest token first. prefixes: [n, words, length], each word without its last
    token, also reversed, padded at the end with -1, which matches anything. Returns [n, words].
    """
    return ((prefixes == tails[:, None, :]) | (prefixes < 0)).all(-1)


def unpack_bitmask(bits: Tensor, vocab_size: int) -> Tensor:
    """[rows, ceil(vocab / 32)] int32, token t at bit t % 32 of word t // 32 -> [rows, vocab]."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, :vocab_size].bool()


def mask_tokens(logits: Tensor, allowed: Tensor) -> Tensor:
    """A copy of `logits`, [rows, vocab], with -inf for tokens whose bit is not set."""
    return logits.masked_fill(~unpack_bitmask(allowed, logits.shape[1]), NEG_INF)


def scale_logits(logits: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    """(logits - best) / temperature, where best is the row's maximum.

    The most likely token is at 0, so no temperature overflows, however small. logits: [rows, vocab]
    float32; best, temperature: [rows].
    """
    return (logits - best[:, None]).div_(temperature[:, None])


def processed_logits(
    logits: Tensor,  # [rows, vocab]
    slots: Tensor,  # [rows] int64
    floats: Tensor,  # as for `choose_tokens`
    ints: Tensor,
) -> Tensor:
    """The logits that tokens are drawn from: by temperature, -inf for truncated tokens.

    Rows with temperature 0 stay as they are. [rows, vocab] float32
    """
    logits, temperature = logits.float(), floats[slots, 0]
    best = logits.amax(-1)
    scaled = scale_logits(logits, best, temperature)
    cutoff = truncation_cutoff(
        scaled, Truncation(floats[slots, 1], ints[slots, 0], floats[slots, 2])
    )
    is_random = (temperature > GREEDY)[:, None]
    # The lowest temperatures would overflow.
    divided = scaled + (best / temperature).clamp(-LARGEST_FLOAT32, LARGEST_FLOAT32)[:, None]
    divided = divided.masked_fill_(scaled < cutoff[:, None], NEG_INF)
    return torch.where(is_random, divided, logits)


def token_mass(scaled: Tensor) -> Tensor:
    """exp(scaled) as integers in float32; zero below 2**-35 of the best token's mass."""
    return exact.exp(scaled).mul_(BEST_MASS).round_()


def nucleus_limit(total: Tensor, top_p: Tensor) -> Tensor:
    """A token is in the nucleus if the mass before it is below this limit. [rows] float64"""
    limit = total * top_p
    return limit.masked_fill(top_p >= 1.0, float("inf"))


def truncation_cutoff(scaled: Tensor, truncation: Truncation) -> Tensor:
    """The lowest scaled logit that survives min_p, top_k, then top_p of the rest. [rows]"""
    ordered = scaled.sort(dim=-1, descending=True).values
    kth = ordered.gather(1, truncation.top_k[:, None] - 1)
    survives = ordered >= torch.maximum(kth, truncation.log_min_p[:, None])
    mass = token_mass(ordered).masked_fill_(~survives, 0)
    running = mass.cumsum(-1, dtype=torch.float64)
    limit = nucleus_limit(running[:, -1], truncation.top_p)
    survives &= (running - mass) < limit[:, None]
    return ordered.masked_fill(~survives, float("inf")).amin(-1)


def gumbel_argmax(scaled: Tensor, cutoff: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw one token per row from softmax(scaled) over tokens at or above the cutoff.

    scaled: [rows, vocab]; the others: [rows]. Ties go to the lower token id.
    """
    num_rows, vocab_size = scaled.shape
    groups = torch.arange(-(-vocab_size // TOKENS_PER_CALL), device=scaled.device)
    groups = groups.expand(num_rows, -1)
    noise = gumbel_of_groups(seeds[:, None], positions[:, None], groups)  # [rows, groups, 4]
    scores = scaled + noise.flatten(1)[:, :vocab_size]
    return scores.masked_fill_(scaled < cutoff[:, None], NEG_INF).argmax(-1)


def draw(scaled: Tensor, truncation: Truncation | None, seeds: Tensor, positions: Tensor) -> Tensor:
    """Truncate and draw one token per row. scaled: [rows, vocab], seeds, positions: [rows].

    Never synchronizes with the host. Rows with NaN give an arbitrary token.
    """
    step = max(1, MAX_CHUNK_ELEMENTS // scaled.shape[1])
    tokens = [torch.empty(0, dtype=torch.int64, device=scaled.device)]
    for start in range(0, scaled.shape[0], step):
        part = slice(start, start + step)
        if truncation is None:
            cutoff = torch.full_like(scaled[part, 0], NEG_INF)
        else:
            cutoff = truncation_cutoff(scaled[part], truncation[part])
        tokens.append(gumbel_argmax(scaled[part], cutoff, seeds[part], positions[part]))
    return torch.cat(tokens)


def choose_tokens(
    logits: Tensor,  # [rows, vocab], any floating-point type
    slots: Tensor,  # [rows] int64
    positions: Tensor,  # [rows] int64
    floats: Tensor,  # [num_slots, *]: temperature, log of min_p, top_p, ...
    ints: Tensor,  # [num_slots, *] int64: top_k, seed, ...
    *,
    allowed: Tensor | None = None,  # [rows, ceil(vocab / 32)] int32: one bit per token
    draws: bool = True,  # whether any row has a temperature
    truncates: bool = True,  # whether any row has top_k, top_p or min_p
    draw: Callable[[Tensor, Truncation | None, Tensor, Tensor], Tensor] = draw,
) -> tuple[Tensor, Tensor]:
    """Token [rows] int64 and fault [rows] bool of each row: greedy where the temperature is 0.

    A row with NaN, plus infinity or no eligible token is faulted and gets token 0.
    """
    best, tokens = logits.max(-1)
    faulted = ~torch.isfinite(best)
    if allowed is not None:
        logits = mask_tokens(logits, allowed)
        best, tokens = logits.max(-1)
        faulted |= ~torch.isfinite(best)
    if draws:
        random = (floats[slots, 0] > GREEDY).nonzero()[:, 0]
        own = slots[random]
        truncation = Truncation(floats[own, 1], ints[own, 0], floats[own, 2])
        scaled = scale_logits(logits[random].float(), best[random].float(), floats[own, 0])
        tokens[random] = draw(
            scaled, truncation if truncates else None, ints[own, 1], positions[random]
        )
    return tokens.masked_fill_(faulted, 0), faulted


def top_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    k: int,
    named: tuple[Tensor, Tensor] | None = None,
    normalize: bool = True,
) -> TopLogprobs:
    """Log-probabilities under these logits, in float32.

    logits: [rows, vocab], token_ids: [rows]; k = 0 gives only the tokens' own. `named`: some rows,
    [n] int64, and the tokens, [n, width] int64, that replace the top ones there. Without
    `normalize` the values are the logits themselves.
    """
    vocab_size = logits.shape[1]
    logprobs = logits.to(torch.float32)
    if normalize:
        logprobs = logprobs.log_softmax(-1)
    chosen = logprobs.gather(1, token_ids[:, None].to(torch.int64))
    ranks = (logprobs > chosen).sum(-1) + 1
    if k == 0:
        top_ids = token_ids.new_empty((logits.shape[0], 0), dtype=torch.int64)
    else:
        # One integer orders by value, then by id. Without ties, the top k1 are always the head of
        # the top k2, so a row's result does not depend on the k of its neighbours.
        bits = (logprobs + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
        order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
        ids = torch.arange(vocab_size, device=logits.device)
        keys = (order << 32) + (vocab_size - 1 - ids)
        top_ids = keys.topk(min(k, vocab_size), dim=-1).indices
    if named is not None:
        rows, ids = named
        top_ids = torch.nn.functional.pad(top_ids, (0, max(ids.shape[1] - top_ids.shape[1], 0)))
        top_ids[rows, : ids.shape[1]] = ids
    return TopLogprobs(
        token_ids=token_ids,
        logprobs=chosen[:, 0],
        ranks=ranks,
        top_ids=top_ids,
        top_logprobs=logprobs.gather(1, top_ids),
    )
