"""Chooses tokens: the most likely, or a draw with the request's own Gumbel noise.

A row of logits is long (150,000 tokens) and rows may be few. Therefore each row is split into
chunks for different programs, and a last small kernel compares the chunks' winners. Truncation
(top_k, top_p, min_p) is a cutoff, found without sorting. A survey of the row picks, out of a few
thresholds, one that the cutoff is not below. Among the tokens above it, the cutoff is found digit
by digit. `penstock.ops.sampling` defines the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.ops.triton.bitmask import apply_bitmask

CHUNK = 4096
BEST_MASS = tl.constexpr(17179869184.0)  # penstock.ops.sampling.BEST_MASS, 2**34
GREEDY = tl.constexpr(1.1754943508222875e-38)  # the value for temperature 0 in the tables


@triton.jit
def _temperature(floats_ptr, slot, floats_stride):
    """The row's temperature. A padding row, with slot -1, does not draw."""
    return tl.load(floats_ptr + slot * floats_stride, mask=slot >= 0, other=0.0)


@triton.jit
def _best_kernel(
    logits_ptr, best_ptr, best_id_ptr, stride, vocab_size, num_chunks, CHUNK: tl.constexpr
):
    """The largest logit of a chunk and its token; NaN if there is one."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = tokens < vocab_size
    x = tl.load(logits_ptr + row.to(tl.int64) * stride + tokens, mask=mask, other=float("-inf"))
    x = x.to(tl.float32)
    has_nan = tl.max((x != x).to(tl.int32), axis=0)
    best, index = tl.max(x, axis=0, return_indices=True)
    best = tl.where(has_nan > 0, float("nan"), best)
    tl.store(best_ptr + row * num_chunks + chunk, best)
    tl.store(best_id_ptr + row * num_chunks + chunk, chunk * CHUNK + index)


@triton.jit
def _row_best(best_ptr, row, num_chunks, CHUNKS: tl.constexpr):
    """The row's largest logit and its chunk; NaN if any chunk has one."""
    chunks = tl.arange(0, CHUNKS)
    best = tl.load(
        best_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf")
    )
    has_nan = tl.max((best != best).to(tl.int32), axis=0)
    value, index = tl.max(best, axis=0, return_indices=True)
    return tl.where(has_nan > 0, float("nan"), value), index


@triton.jit
def _random(seed, position, groups, N: tl.constexpr):
    """Four words for each of N groups of four tokens."""
    low = tl.zeros([N], tl.uint32) + (position & 0xFFFFFFFF).to(tl.uint32)
    high = tl.zeros([N], tl.uint32) + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(seed, low, high, groups, tl.zeros([N], tl.uint32))


@triton.jit
def _draw_kernel(
    logits_ptr, slots_ptr, positions_ptr, floats_ptr, ints_ptr, best_ptr, cutoff_ptr, ids_ptr,
    score_ptr, score_id_ptr, stride, vocab_size, num_chunks, floats_stride, ints_stride, first,
    CUTOFF: tl.constexpr, MAPPED: tl.constexpr, SHIFT: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The largest of (logit - best) / temperature + noise in a chunk, for rows that draw.

    MAPPED: the noise is that of the tokens in `ids`. Otherwise column 0 is the token `first`, and
    SHIFT is first % 4.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    temperature = _temperature(floats_ptr, slot, floats_stride)
    if temperature <= GREEDY:
        return
    best, _ = _row_best(best_ptr, row, num_chunks, CHUNKS)
    seed = tl.load(ints_ptr + slot * ints_stride + 1).to(tl.uint64, bitcast=True)
    position = tl.load(positions_ptr + row)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK) - SHIFT
    mask = (tokens < vocab_size) & (tokens >= 0)
    # One call of the generator serves four tokens.
    if MAPPED:
        ids = tl.load(ids_ptr + tokens, mask=mask, other=0)
        w0, w1, w2, w3 = _random(seed, position, (ids // 4).to(tl.uint32), CHUNK)
        even = tl.where(ids % 4 == 0, w0, w2)
        words = tl.where(ids % 2 == 0, even, tl.where(ids % 4 == 1, w1, w3))
    else:
        groups = (first // 4 + chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)).to(tl.uint32)
        w0, w1, w2, w3 = _random(seed, position, groups, CHUNK // 4)
        words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    u = ((words >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2**-23
    noise = -tl.log(-tl.log(u))
    x = tl.load(logits_ptr + row.to(tl.int64) * stride + tokens, mask=mask, other=float("-inf"))
    scaled = tl.div_rn(x.to(tl.float32) - best, tl.zeros([CHUNK], tl.float32) + temperature)
    # A faulted row is NaN throughout; its token is ignored.
    score = scaled + noise
    score = tl.where(mask & (score == score), score, float("-inf"))
    if CUTOFF:
        score = tl.where(scaled < tl.load(cutoff_ptr + row), float("-inf"), score)
    value, index = tl.max(score, axis=0, return_indices=True)
    tl.store(score_ptr + row * num_chunks + chunk, value)
    tl.store(score_id_ptr + row * num_chunks + chunk, chunk * CHUNK + index - SHIFT)


@triton.jit
def _pick_kernel(
    slots_ptr, floats_ptr, best_ptr, best_id_ptr, score_ptr, score_id_ptr, ids_ptr, tokens_ptr,
    faulted_ptr, num_chunks, floats_stride,
    DRAWS: tl.constexpr, MAPPED: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The winner among a row's chunks. Ties go to the lower token id."""
    row = tl.program_id(0)
    best, chunk = _row_best(best_ptr, row, num_chunks, CHUNKS)
    token = tl.load(best_id_ptr + row * num_chunks + chunk)
    if DRAWS:
        temperature = _temperature(floats_ptr, tl.load(slots_ptr + row), floats_stride)
        if temperature > GREEDY:
            _, chunk = _row_best(score_ptr, row, num_chunks, CHUNKS)
            token = tl.load(score_id_ptr + row * num_chunks + chunk)
    if MAPPED:
        token = tl.load(ids_ptr + token)
    # NaN and infinity of either sign fault the row.
    faulted = (tl.abs(best) < float("inf")) == 0
    tl.store(tokens_ptr + row, tl.where(faulted, 0, token).to(tl.int64))
    tl.store(faulted_ptr + row, faulted.to(tl.int8))


@triton.jit
def _order(x):
    """Map float32 to int64, preserving order, from 0 to 2**32 - 1."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _unorder(key):
    bits = (key - 2147483648).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _thresholds():
    """Sixteen scaled logits from -0.5 down to -32. The best token is at 0."""
    return -tl.exp2(tl.arange(0, 16).to(tl.float32) * 0.4 - 1.0)


@triton.jit
def _mass(scaled):
    """exp(scaled) as integers, whose sum is exact in any order."""
    return tl.floor(tl.exp(scaled) * BEST_MASS + 0.5).to(tl.int64)


@triton.jit
def _load_scaled(logits_ptr, row, tokens, stride, vocab_size, best, temperature, N: tl.constexpr):
    x = tl.load(
        logits_ptr + row.to(tl.int64) * stride + tokens, mask=tokens < vocab_size,
        other=float("-inf"),
    )  # fmt: skip
    return tl.div_rn(x.to(tl.float32) - best, tl.zeros([N], tl.float32) + temperature)


@triton.jit
def _survey_kernel(
    logits_ptr, slots_ptr, floats_ptr, best_ptr, counts_ptr, masses_ptr, totals_ptr,
    stride, vocab_size, num_chunks, floats_stride, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Per chunk: count and mass of tokens above each threshold, and the mass that min_p leaves."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    temperature = _temperature(floats_ptr, slot, floats_stride)
    if temperature <= GREEDY:
        return
    floor = tl.load(floats_ptr + slot * floats_stride + 1)  # log of min_p
    best, _ = _row_best(best_ptr, row, num_chunks, CHUNKS)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    scaled = _load_scaled(logits_ptr, row, tokens, stride, vocab_size, best, temperature, CHUNK)
    mass = tl.where((tokens < vocab_size) & (scaled >= floor), _mass(scaled), 0)
    reached = (scaled[None, :] >= _thresholds()[:, None]) & (tokens < vocab_size)[None, :]
    at = (row * num_chunks + chunk) * 16 + tl.arange(0, 16)
    tl.store(counts_ptr + at, tl.sum(reached.to(tl.int32), axis=1))
    tl.store(masses_ptr + at, tl.sum(tl.where(reached, mass[None, :], 0), axis=1))
    tl.store(totals_ptr + row * num_chunks + chunk, tl.sum(mass, axis=0))


@triton.jit
def _gather_kernel(
    logits_ptr, slots_ptr, floats_ptr, ints_ptr, best_ptr, counts_ptr, masses_ptr, totals_ptr,
    kept_ptr, num_kept_ptr, stride, vocab_size, num_chunks, floats_stride, ints_stride,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Store the tokens that may contain the cutoff contiguously, in any order."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    temperature = _temperature(floats_ptr, slot, floats_stride)
    if temperature <= GREEDY:
        return
    top_p = tl.load(floats_ptr + slot * floats_stride + 2)
    top_k = tl.load(ints_ptr + slot * ints_stride)
    best, _ = _row_best(best_ptr, row, num_chunks, CHUNKS)
    chunks = tl.arange(0, CHUNKS)
    there = chunks < num_chunks
    at = (row * num_chunks + chunks[:, None]) * 16 + tl.arange(0, 16)[None, :]
    counts = tl.sum(tl.load(counts_ptr + at, mask=there[:, None], other=0), axis=0)
    masses = tl.sum(tl.load(masses_ptr + at, mask=there[:, None], other=0), axis=0)
    total = tl.sum(tl.load(totals_ptr + row * num_chunks + chunks, mask=there, other=0), axis=0)
    # With top_k, only its tokens count for top_p. Otherwise the nucleus is of the whole row.
    if top_k < vocab_size:
        enough = counts >= top_k
    else:
        enough = masses.to(tl.float64) >= total.to(tl.float64) * top_p.to(tl.float64)
    threshold = tl.max(tl.where(enough, _thresholds(), float("-inf")), axis=0)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    scaled = _load_scaled(logits_ptr, row, tokens, stride, vocab_size, best, temperature, CHUNK)
    keep = (scaled >= threshold) & (tokens < vocab_size)
    place = tl.cumsum(keep.to(tl.int32), axis=0) - 1
    first = tl.atomic_add(num_kept_ptr + row, tl.sum(keep.to(tl.int32), axis=0))
    tl.store(kept_ptr + row.to(tl.int64) * vocab_size + first + place, scaled, mask=keep)


@triton.jit
def _cutoff_kernel(
    slots_ptr, floats_ptr, ints_ptr, totals_ptr, kept_ptr, num_kept_ptr, cutoff_ptr,
    last_ptr, ties_ptr, kept_stride, vocab_size, num_chunks, floats_stride, ints_stride, ranks,
    RANKS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The lowest scaled logit of a row that survives min_p, top_k, then top_p of the rest.

    Each search fixes four bits of the cutoff at a time: one pass compares sixteen candidates with
    all kept tokens. With RANKS, each rank's last value stands for `ties` more tokens.
    """
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    if _temperature(floats_ptr, slot, floats_stride) <= GREEDY:
        return
    floor = tl.load(floats_ptr + slot * floats_stride + 1)  # log of min_p
    top_p = tl.load(floats_ptr + slot * floats_stride + 2)
    top_k = tl.load(ints_ptr + slot * ints_stride)
    source = kept_ptr + row.to(tl.int64) * kept_stride
    num_kept = tl.load(num_kept_ptr + row)
    candidates = tl.arange(0, 16).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    masses = tl.load(totals_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=0)
    total = tl.sum(masses, axis=0)
    if top_k < vocab_size:
        # The largest key that at least top_k tokens reach.
        key = tl.zeros([], tl.int64)
        for digit in range(8):
            step = candidates << (28 - 4 * digit)
            count = tl.zeros([16, BLOCK], tl.int32)
            for at in range(0, num_kept, BLOCK):
                index = at + tl.arange(0, BLOCK)
                scaled = tl.load(source + index, mask=index < num_kept, other=float("-inf"))
                reached = _order(scaled)[None, :] >= (key + step)[:, None]
                count += (reached & (index < num_kept)[None, :]).to(tl.int32)
            enough = tl.sum(count, axis=1) >= top_k
            key += tl.max(tl.where(enough, step, 0), axis=0)
        kth = _unorder(key)
        floor = tl.maximum(floor, kth)
        survivors = tl.zeros([BLOCK], tl.int64)
        for at in range(0, num_kept, BLOCK):
            index = at + tl.arange(0, BLOCK)
            scaled = tl.load(source + index, mask=index < num_kept, other=float("-inf"))
            survivors += tl.where((scaled >= floor) & (index < num_kept), _mass(scaled), 0)
        total = tl.sum(survivors, axis=0)
        if RANKS > 0:
            each = tl.arange(0, RANKS)
            last = tl.load(last_ptr + row * ranks + each, mask=each < ranks, other=float("nan"))
            ties = tl.load(ties_ptr + row * ranks + each, mask=each < ranks, other=0.0)
            ties = tl.where(last == kth, ties, 0.0).to(tl.int64)
            total += tl.where(kth >= floor, tl.sum(ties, axis=0) * _mass(kth), 0)
    if top_p < 1.0:
        # The largest key with at least the nucleus's mass above it; the next key is the cutoff.
        limit = total.to(tl.float64) * top_p.to(tl.float64)
        key = tl.zeros([], tl.int64)
        for digit in range(8):
            step = candidates << (28 - 4 * digit)
            above = tl.zeros([16, BLOCK], tl.int64)
            for at in range(0, num_kept, BLOCK):
                index = at + tl.arange(0, BLOCK)
                scaled = tl.load(source + index, mask=index < num_kept, other=float("-inf"))
                mass = tl.where((scaled >= floor) & (index < num_kept), _mass(scaled), 0)
                is_above = _order(scaled)[None, :] > (key + step)[:, None]
                above += tl.where(is_above, mass[None, :], 0)
            full = tl.sum(above, axis=1).to(tl.float64) >= limit
            key += tl.max(tl.where(full, step, 0), axis=0)
        floor = tl.maximum(floor, _unorder(key + 1))
    tl.store(cutoff_ptr + row, floor)


def choose_tokens(
    logits: torch.Tensor,  # [rows, vocab], any floating-point type
    slots: torch.Tensor,  # [rows] int64; -1 is padding, which gets an arbitrary token
    positions: torch.Tensor,  # [rows] int64
    floats: torch.Tensor,  # [num_slots, *]: temperature, log of min_p, top_p, ...
    ints: torch.Tensor,  # [num_slots, *] int64: top_k, seed, ...
    *,
    allowed: torch.Tensor | None = None,  # [rows, ceil(vocab / 32)] int32: one bit per token
    draws: bool = True,  # whether any row has a temperature
    truncates: bool = True,  # whether any row has top_k, top_p or min_p
    token_ids: torch.Tensor | None = None,  # [vocab] int64: the tokens of the logits; None: all
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token [rows] int64 and fault [rows] bool of each row: greedy where the temperature is 0."""
    num_rows, vocab_size = logits.shape
    if allowed is not None:
        logits = logits.clone()
        apply_bitmask(logits, allowed, torch.arange(num_rows, device=logits.device))
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    chunks = max(triton.next_power_of_2(num_chunks), 2)
    device = logits.device
    values = torch.empty((2, num_rows, num_chunks), dtype=torch.float32, device=device)
    ids = torch.empty((2, num_rows, num_chunks), dtype=torch.int32, device=device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    faulted = torch.empty(num_rows, dtype=torch.bool, device=device)
    if num_rows == 0:
        return tokens, faulted
    stride, grid = logits.stride(0), (num_rows, num_chunks)
    _best_kernel[grid](
        logits, values[0], ids[0], stride, vocab_size, num_chunks, CHUNK=CHUNK, num_warps=8
    )
    cutoff, ids_of = values, slots if token_ids is None else token_ids
    is_mapped = token_ids is not None
    if draws and truncates:
        cutoff = _cutoffs(logits, slots, floats, ints, values[0])
    if draws:
        _draw_kernel[grid](
            logits, slots, positions, floats, ints, values[0], cutoff, ids_of, values[1], ids[1],
            stride, vocab_size, num_chunks, floats.stride(0), ints.stride(0), 0,
            CUTOFF=truncates, MAPPED=is_mapped, SHIFT=0, CHUNKS=chunks, CHUNK=CHUNK, num_warps=8,
        )  # fmt: skip
    _pick_kernel[(num_rows,)](
        slots, floats, values[0], ids[0], values[1], ids[1], ids_of, tokens,
        faulted.view(torch.int8), num_chunks, floats.stride(0), DRAWS=draws, MAPPED=is_mapped,
        CHUNKS=chunks, num_warps=1,
    )  # fmt: skip
    return tokens, faulted


def _cutoffs(
    logits: torch.Tensor,
    slots: torch.Tensor,
    floats: torch.Tensor,
    ints: torch.Tensor,
    best: torch.Tensor,  # [rows, num_chunks]
) -> torch.Tensor:
    """The lowest scaled logit that may be drawn: [rows]; arbitrary for rows that do not draw."""
    (num_rows, vocab_size), num_chunks = logits.shape, best.shape[1]
    chunks = max(triton.next_power_of_2(num_chunks), 2)

    def new(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    counts = new(num_rows, num_chunks, 16, dtype=torch.int32)
    masses = new(num_rows, num_chunks, 16, dtype=torch.int64)
    totals = new(num_rows, num_chunks, dtype=torch.int64)
    kept = new(num_rows, vocab_size, dtype=torch.float32)
    num_kept = new(num_rows, dtype=torch.int32).zero_()
    cutoff = new(num_rows, dtype=torch.float32)
    grid, sizes = (num_rows, num_chunks), (vocab_size, num_chunks, floats.stride(0))
    _survey_kernel[grid](
        logits, slots, floats, best, counts, masses, totals, logits.stride(0), *sizes,
        CHUNKS=chunks, CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    _gather_kernel[grid](
        logits, slots, floats, ints, best, counts, masses, totals, kept, num_kept,
        logits.stride(0), *sizes, ints.stride(0), CHUNKS=chunks, CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    _cutoff_kernel[(num_rows,)](
        slots, floats, ints, totals, kept, num_kept, cutoff, kept, kept, vocab_size, *sizes,
        ints.stride(0), 0, RANKS=0, CHUNKS=chunks, BLOCK=256, num_warps=4,
    )  # fmt: skip
    return cutoff
