"""Choosing tokens: the most likely, or a draw with the request's own Gumbel noise.

A row of logits is long (150,000 tokens) and rows may be few, so each row is cut into chunks that
different programs look at; a last small kernel compares the chunks' winners. Truncation (top_k,
top_p, min_p) is a cutoff, found digit by digit without sorting: see `penstock.ops.sampling` for
what it promises.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 4096
BEST_MASS = tl.constexpr(17179869184.0)  # penstock.ops.sampling.BEST_MASS, 2**34
GREEDY = tl.constexpr(1.1754943508222875e-38)  # what the tables hold for temperature 0


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
    """The row's largest logit and the chunk it is in; NaN if any chunk has one."""
    chunks = tl.arange(0, CHUNKS)
    best = tl.load(
        best_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf")
    )
    has_nan = tl.max((best != best).to(tl.int32), axis=0)
    value, index = tl.max(best, axis=0, return_indices=True)
    return tl.where(has_nan > 0, float("nan"), value), index


@triton.jit
def _draw_kernel(
    logits_ptr, slots_ptr, positions_ptr, floats_ptr, ints_ptr, best_ptr, cutoff_ptr,
    score_ptr, score_id_ptr, stride, vocab_size, num_chunks, floats_stride, ints_stride,
    CUTOFF: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The largest of (logit - best) / temperature + noise in a chunk, for rows that draw."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    temperature = tl.load(floats_ptr + slot * floats_stride)
    if temperature <= GREEDY:
        return
    best, _ = _row_best(best_ptr, row, num_chunks, CHUNKS)
    seed = tl.load(ints_ptr + slot * ints_stride + 1).to(tl.uint64, bitcast=True)
    position = tl.load(positions_ptr + row)
    # One call of the generator serves four tokens.
    groups = (chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)).to(tl.uint32)
    low = tl.zeros([CHUNK // 4], tl.uint32) + (position & 0xFFFFFFFF).to(tl.uint32)
    high = tl.zeros([CHUNK // 4], tl.uint32) + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, low, high, groups, tl.zeros([CHUNK // 4], tl.uint32))
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    u = ((words >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2**-23
    noise = -tl.log(-tl.log(u))
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = tokens < vocab_size
    x = tl.load(logits_ptr + row.to(tl.int64) * stride + tokens, mask=mask, other=float("-inf"))
    scaled = tl.div_rn(x.to(tl.float32) - best, tl.zeros([CHUNK], tl.float32) + temperature)
    # A row without usable logits is NaN throughout; what it picks does not matter.
    score = scaled + noise
    score = tl.where(mask & (score == score), score, float("-inf"))
    if CUTOFF:
        score = tl.where(scaled < tl.load(cutoff_ptr + row), float("-inf"), score)
    value, index = tl.max(score, axis=0, return_indices=True)
    tl.store(score_ptr + row * num_chunks + chunk, value)
    tl.store(score_id_ptr + row * num_chunks + chunk, chunk * CHUNK + index)


@triton.jit
def _pick_kernel(
    slots_ptr, floats_ptr, best_ptr, best_id_ptr, score_ptr, score_id_ptr, tokens_ptr, faulted_ptr,
    num_chunks, floats_stride, DRAWS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The winner among the chunks of a row. Equal ones: the lower token."""
    row = tl.program_id(0)
    best, chunk = _row_best(best_ptr, row, num_chunks, CHUNKS)
    token = tl.load(best_id_ptr + row * num_chunks + chunk)
    if DRAWS:
        temperature = tl.load(floats_ptr + tl.load(slots_ptr + row) * floats_stride)
        if temperature > GREEDY:
            _, chunk = _row_best(score_ptr, row, num_chunks, CHUNKS)
            token = tl.load(score_id_ptr + row * num_chunks + chunk)
    # NaN and infinity, either sign, are no basis for a choice.
    faulted = (tl.abs(best) < float("inf")) == 0
    tl.store(tokens_ptr + row, tl.where(faulted, 0, token).to(tl.int64))
    tl.store(faulted_ptr + row, faulted.to(tl.int8))


@triton.jit
def _order(x):
    """float32 to int64, in order, from 0 to 2**32 - 1."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _unorder(key):
    bits = (key - 2147483648).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _cutoff_kernel(
    logits_ptr, slots_ptr, floats_ptr, ints_ptr, best_ptr, cutoff_ptr,
    stride, vocab_size, num_chunks, floats_stride, ints_stride,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The least scaled logit of a row that survives min_p, top_k, then top_p of what is left.

    Each search fixes a cutoff's bits four at a time: sixteen candidates are compared with the
    whole row in one pass.
    """
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    temperature = tl.load(floats_ptr + slot * floats_stride)
    floor = tl.load(floats_ptr + slot * floats_stride + 1)  # log of min_p
    top_p = tl.load(floats_ptr + slot * floats_stride + 2)
    top_k = tl.load(ints_ptr + slot * ints_stride)
    if temperature <= GREEDY:
        return
    best, _ = _row_best(best_ptr, row, num_chunks, CHUNKS)
    source = logits_ptr + row.to(tl.int64) * stride
    temperatures = tl.zeros([BLOCK], tl.float32) + temperature
    candidates = tl.arange(0, 16).to(tl.int64)
    if top_k < vocab_size:
        # The largest key that at least top_k tokens reach.
        key = tl.zeros([], tl.int64)
        for digit in range(8):
            step = candidates << (28 - 4 * digit)
            count = tl.zeros([16, BLOCK], tl.int32)
            for at in range(0, vocab_size, BLOCK):
                tokens = at + tl.arange(0, BLOCK)
                x = tl.load(source + tokens, mask=tokens < vocab_size, other=float("-inf"))
                scaled = tl.div_rn(x.to(tl.float32) - best, temperatures)
                reached = _order(scaled)[None, :] >= (key + step)[:, None]
                count += (reached & (tokens < vocab_size)[None, :]).to(tl.int32)
            enough = tl.sum(count, axis=1) >= top_k
            key += tl.max(tl.where(enough, step, 0), axis=0)
        floor = tl.maximum(floor, _unorder(key))
    if top_p < 1.0:
        # The smallest key with less mass above it than the nucleus holds. Mass is counted in
        # whole numbers, so its sum is exact; pass 0 has no candidates and finds the total.
        total = tl.zeros([BLOCK], tl.int64)
        for at in range(0, vocab_size, BLOCK):
            tokens = at + tl.arange(0, BLOCK)
            x = tl.load(source + tokens, mask=tokens < vocab_size, other=float("-inf"))
            scaled = tl.div_rn(x.to(tl.float32) - best, temperatures)
            mass = tl.floor(tl.exp(scaled) * BEST_MASS + 0.5).to(tl.int64)
            total += tl.where((scaled >= floor) & (tokens < vocab_size), mass, 0)
        limit = tl.sum(total, axis=0).to(tl.float64) * top_p.to(tl.float64)
        # Largest key with at least `limit` mass above it, or none: the next one up is the cutoff.
        key = tl.zeros([], tl.int64)
        for digit in range(8):
            step = candidates << (28 - 4 * digit)
            above = tl.zeros([16, BLOCK], tl.int64)
            for at in range(0, vocab_size, BLOCK):
                tokens = at + tl.arange(0, BLOCK)
                x = tl.load(source + tokens, mask=tokens < vocab_size, other=float("-inf"))
                scaled = tl.div_rn(x.to(tl.float32) - best, temperatures)
                mass = tl.floor(tl.exp(scaled) * BEST_MASS + 0.5).to(tl.int64)
                mass = tl.where((scaled >= floor) & (tokens < vocab_size), mass, 0)
                is_above = _order(scaled)[None, :] > (key + step)[:, None]
                above += tl.where(is_above, mass[None, :], 0)
            full = tl.sum(above, axis=1).to(tl.float64) >= limit
            key += tl.max(tl.where(full, step, 0), axis=0)
        floor = tl.maximum(floor, _unorder(key + 1))
    tl.store(cutoff_ptr + row, floor)


def choose_tokens(
    logits: torch.Tensor,  # [rows, vocab] float32
    slots: torch.Tensor,  # [rows] int64
    positions: torch.Tensor,  # [rows] int64
    floats: torch.Tensor,  # [num_slots, *]: temperature, log of min_p, top_p, ...
    ints: torch.Tensor,  # [num_slots, *] int64: top_k, seed, ...
    *,
    draws: bool,  # whether any row has a temperature
    truncates: bool,  # whether any row has top_k, top_p or min_p
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token [rows] int64 and fault [rows] bool of each row: greedy where the temperature is 0."""
    num_rows, vocab_size = logits.shape
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
    cutoff = values
    if draws and truncates:
        cutoff = torch.empty(num_rows, dtype=torch.float32, device=device)
        _cutoff_kernel[(num_rows,)](
            logits, slots, floats, ints, values[0], cutoff, stride, vocab_size, num_chunks,
            floats.stride(0), ints.stride(0), CHUNKS=chunks, BLOCK=512, num_warps=8,
        )  # fmt: skip
    if draws:
        _draw_kernel[grid](
            logits, slots, positions, floats, ints, values[0], cutoff, values[1], ids[1],
            stride, vocab_size, num_chunks, floats.stride(0), ints.stride(0),
            CUTOFF=truncates, CHUNKS=chunks, CHUNK=CHUNK, num_warps=8,
        )  # fmt: skip
    _pick_kernel[(num_rows,)](
        slots, floats, values[0], ids[0], values[1], ids[1], tokens, faulted.view(torch.int8),
        num_chunks, floats.stride(0), DRAWS=draws, CHUNKS=chunks, num_warps=1,
    )  # fmt: skip
    return tokens, faulted
