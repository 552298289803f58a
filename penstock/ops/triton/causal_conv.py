"""The convolution of recurrent layers for single tokens and drafts, and where their states are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.ops.recurrent import StateDrafts, StateStep, conv_chunks


@triton.jit
def find_state(table_ptr, position, BLOCK_SIZE: tl.constexpr):
    """The block of the state after `position`; any block for a negative position."""
    return tl.load(table_ptr + tl.maximum(position, 0) // BLOCK_SIZE).to(tl.int64)


@triton.jit
def find_rows(starts_ptr, seq_lens_ptr, accepted_ptr, request, REPLAY: tl.constexpr):
    """A query with drafts: its row and position, and its first token to compute and the end."""
    start = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - start
    position = tl.load(seq_lens_ptr + request) - count
    row = (start - tl.load(starts_ptr)).to(tl.int64)
    if REPLAY:
        return row, position, 1, 1 + tl.load(accepted_ptr + request)
    return row, position, 0, count


@triton.jit
def is_kept(index, end, position, BLOCK_SIZE: tl.constexpr, REPLAY: tl.constexpr):
    """Whether the state after a query's token is stored: see `StateDrafts`."""
    if REPLAY:
        return (index == end - 1) | ((position + index + 1) % BLOCK_SIZE == 0)
    return index == 0


def new_output(x: torch.Tensor, dtype: torch.dtype, step: StateStep) -> torch.Tensor:
    """Like x. No kernel writes the padding rows of a step with drafts."""
    make = torch.empty if step.drafts is None else torch.zeros
    return make(x.shape, dtype=dtype, device=x.device)


def draft_lengths(drafts: StateDrafts) -> tuple[torch.Tensor, ...]:
    """The arguments of kernels that say where the drafts are."""
    accepted = drafts.seq_lens if drafts.num_accepted is None else drafts.num_accepted
    return drafts.query_starts, drafts.seq_lens, drafts.block_table, accepted


@triton.jit
def _conv_kernel(
    x_ptr, weight_ptr, bias_ptr, states_ptr, out_ptr, seq_lens_ptr, table_ptr,
    x_stride, state_stride, table_stride, channels,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < channels
    out = out_ptr + request * channels + channel
    seq_len = tl.load(seq_lens_ptr + request)
    if seq_len <= 0:  # padding
        tl.store(out, tl.zeros([BLOCK], out_ptr.dtype.element_ty), mask=mask)
        return
    table = table_ptr + request * table_stride
    source = states_ptr + find_state(table, seq_len - 2, BLOCK_SIZE) * state_stride + channel
    target = states_ptr + find_state(table, seq_len - 1, BLOCK_SIZE) * state_stride + channel
    weights = weight_ptr + channel * WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for index in tl.static_range(WIDTH - 1):
        past = tl.load(source + index * channels, mask=mask, other=0.0)
        past = tl.where(seq_len > 1, past, 0.0).to(past.dtype)
        weight = tl.load(weights + index, mask=mask, other=0.0).to(tl.float32)
        total += past.to(tl.float32) * weight
        if index > 0:
            tl.store(target + (index - 1) * channels, past, mask=mask)
    x = tl.load(x_ptr + request * x_stride + channel, mask=mask, other=0.0)
    x = x.to(states_ptr.dtype.element_ty)
    tl.store(target + (WIDTH - 2) * channels, x, mask=mask)
    weight = tl.load(weights + WIDTH - 1, mask=mask, other=0.0).to(tl.float32)
    total += x.to(tl.float32) * weight
    if HAS_BIAS:
        total += tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    activated = total / (1.0 + tl.exp(-total))
    tl.store(out, activated.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _conv_input(x, token, first, old, has_past, channels, x_stride, mask, WIDTH: tl.constexpr):
    """The input of a query's token. Those before the first one are in the state."""
    if token >= first:
        value = tl.load(x + token * x_stride, mask=mask, other=0.0).to(old.dtype.element_ty)
    else:
        value = tl.load(old + (token - first + WIDTH - 1) * channels, mask=mask, other=0.0)
        value = tl.where(has_past, value, 0.0).to(old.dtype.element_ty)
    return value


@triton.jit
def _conv_drafts_kernel(
    x_ptr, weight_ptr, bias_ptr, states_ptr, out_ptr,
    starts_ptr, seq_lens_ptr, table_ptr, accepted_ptr,
    x_stride, state_stride, table_stride, channels,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_BIAS: tl.constexpr, REPLAY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per request and part of the channels."""
    request = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < channels
    row, position, first, end = find_rows(starts_ptr, seq_lens_ptr, accepted_ptr, request, REPLAY)
    if first >= end:  # padding, or nothing to replay
        return
    table = table_ptr + request.to(tl.int64) * table_stride
    old = states_ptr + find_state(table, position + first - 1, BLOCK_SIZE) * state_stride + channel
    has_past = position + first > 0
    x = x_ptr + row * x_stride + channel
    weights = weight_ptr + channel * WIDTH
    for index in range(first, end):
        total = tl.zeros([BLOCK], tl.float32)
        for tap in tl.static_range(WIDTH):
            token = index + tap - (WIDTH - 1)
            value = _conv_input(x, token, first, old, has_past, channels, x_stride, mask, WIDTH)
            weight = tl.load(weights + tap, mask=mask, other=0.0).to(tl.float32)
            total += value.to(tl.float32) * weight
        if HAS_BIAS:
            total += tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)
        activated = total / (1.0 + tl.exp(-total))
        out = out_ptr + (row + index) * channels + channel
        tl.store(out, activated.to(out_ptr.dtype.element_ty), mask=mask)
    # The state in `old` is overwritten last, and each of its tokens after it was read.
    for step in range(end - first):
        index = end - 1 - step
        if is_kept(index, end, position, BLOCK_SIZE, REPLAY):
            new = states_ptr + find_state(table, position + index, BLOCK_SIZE) * state_stride
            for tap in tl.static_range(1, WIDTH):
                token = index + tap - (WIDTH - 1)
                value = _conv_input(x, token, first, old, has_past, channels, x_stride, mask, WIDTH)
                tl.store(new + (tap - 1) * channels + channel, value, mask=mask)


def causal_conv(
    x: torch.Tensor,  # [num_tokens, channels]
    weight: torch.Tensor,  # [channels, width]
    bias: torch.Tensor | None,  # [channels]
    states: torch.Tensor,  # [num_blocks, width - 1, channels]
    step: StateStep,
) -> torch.Tensor:
    """As the reference."""
    output = new_output(x, x.dtype, step)
    n, (channels, width) = step.num_decodes, weight.shape
    block = min(triton.next_power_of_2(channels), 512)
    if n:
        _conv_kernel[(n, triton.cdiv(channels, block))](
            x, weight, weight if bias is None else bias, states, output,
            step.seq_lens, step.block_table,
            x.stride(0), states.stride(0), step.block_table.stride(0), channels,
            WIDTH=width, BLOCK_SIZE=step.block_size, HAS_BIAS=bias is not None, BLOCK=block,
            num_warps=4,
        )  # fmt: skip
    if step.chunks is not None:
        rows = step.chunks.step_rows
        output[rows] = conv_chunks(x[rows], weight, bias, states, step.chunks)
    if step.drafts is not None:
        own, new = x[step.drafts.step_rows], output[step.drafts.step_rows]
        _conv_drafts_kernel[(len(step.drafts.seq_lens), triton.cdiv(channels, block))](
            own, weight, weight if bias is None else bias, states, new, *draft_lengths(step.drafts),
            own.stride(0), states.stride(0), step.drafts.block_table.stride(0), channels,
            WIDTH=width, BLOCK_SIZE=step.block_size, HAS_BIAS=bias is not None,
            REPLAY=step.drafts.num_accepted is not None, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return output
