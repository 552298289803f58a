"""Decode kernels of recurrent layers: read and write states in their blocks.

The host needs to know only the size of the step, so a captured graph can hold them. Longer queries
use the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.ops.delta_net import EPS, delta_chunks
from penstock.ops.mamba2 import SpaceWeights, mamba2_chunks
from penstock.ops.recurrent import StateStep, conv_chunks

TILE = 4096  # numbers of a state in the registers of one program


@triton.jit
def _find_state(table_ptr, position, BLOCK_SIZE: tl.constexpr):
    """The block of the state after `position`; any block for a negative position."""
    return tl.load(table_ptr + tl.maximum(position, 0) // BLOCK_SIZE).to(tl.int64)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), accurate to a few bits near 0 and near x."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, log1p)


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
    source = states_ptr + _find_state(table, seq_len - 2, BLOCK_SIZE) * state_stride + channel
    target = states_ptr + _find_state(table, seq_len - 1, BLOCK_SIZE) * state_stride + channel
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


def causal_conv(
    x: torch.Tensor,  # [num_tokens, channels]
    weight: torch.Tensor,  # [channels, width]
    bias: torch.Tensor | None,  # [channels]
    states: torch.Tensor,  # [num_blocks, width - 1, channels]
    step: StateStep,
) -> torch.Tensor:
    """As the reference."""
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n, (channels, width) = step.num_decodes, weight.shape
    if n:
        block = min(triton.next_power_of_2(channels), 512)
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
    return output


@triton.jit
def _mamba2_kernel(
    x_ptr, dt_ptr, b_ptr, c_ptr, a_ptr, d_ptr, dt_bias_ptr, states_ptr, out_ptr,
    seq_lens_ptr, table_ptr,
    x_stride, dt_stride, b_stride, c_stride, state_stride, table_stride,
    heads_per_group, head_dim, state_size, dt_low, dt_high,
    BLOCK_SIZE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program per request, head and part of the head's dimensions."""
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p, n = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    in_p, in_n = p < head_dim, n < state_size
    out = out_ptr + (request * tl.num_programs(1) + head) * head_dim + p
    seq_len = tl.load(seq_lens_ptr + request)
    if seq_len <= 0:  # padding
        tl.store(out, tl.zeros([BLOCK_P], tl.float32), mask=in_p)
        return
    table = table_ptr + request * table_stride
    place = (head * head_dim + p[:, None]) * state_size + n[None, :]
    source = states_ptr + _find_state(table, seq_len - 2, BLOCK_SIZE) * state_stride + place
    target = states_ptr + _find_state(table, seq_len - 1, BLOCK_SIZE) * state_stride + place
    mask = in_p[:, None] & in_n[None, :]
    state = tl.where(seq_len > 1, tl.load(source, mask=mask, other=0.0), 0.0)

    x = tl.load(x_ptr + request * x_stride + head * head_dim + p, mask=in_p, other=0.0)
    x = x.to(tl.float32)
    group = head // heads_per_group * state_size + n
    b = tl.load(b_ptr + request * b_stride + group, mask=in_n, other=0.0).to(tl.float32)
    c = tl.load(c_ptr + request * c_stride + group, mask=in_n, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + request * dt_stride + head).to(tl.float32)
    dt = _softplus(dt + tl.load(dt_bias_ptr + head))
    dt = tl.minimum(tl.maximum(dt, dt_low), dt_high)
    decay = tl.exp(dt * tl.load(a_ptr + head))
    state = state * decay + (x * dt)[:, None] * b[None, :]
    tl.store(target, state, mask=mask)
    y = tl.sum(state * c[None, :], axis=1) + tl.load(d_ptr + head) * x
    tl.store(out, y, mask=in_p)


def mamba2_scan(
    x: torch.Tensor,  # [num_tokens, heads, head_dim]
    dt: torch.Tensor,  # [num_tokens, heads]
    b: torch.Tensor,  # [num_tokens, groups, state_size]
    c: torch.Tensor,
    weights: SpaceWeights,
    states: torch.Tensor,  # [num_blocks, heads, head_dim, state_size] float32
    step: StateStep,
) -> torch.Tensor:
    """As the reference."""
    output = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    num, (_, heads, head_dim), (_, groups, state_size) = step.num_decodes, x.shape, b.shape
    if num:
        assert all(t.stride()[1:] == (t.shape[2], 1) for t in (x, b, c))
        assert dt.stride(1) == 1
        block_n = triton.next_power_of_2(state_size)
        block_p = min(triton.next_power_of_2(head_dim), max(TILE // block_n, 1))
        _mamba2_kernel[(num, heads, triton.cdiv(head_dim, block_p))](
            x, dt, b, c, weights.a, weights.d, weights.dt_bias, states, output,
            step.seq_lens, step.block_table,
            x.stride(0), dt.stride(0), b.stride(0), c.stride(0), states.stride(0),
            step.block_table.stride(0),
            heads // groups, head_dim, state_size, *weights.dt_limit,
            BLOCK_SIZE=step.block_size, BLOCK_P=block_p, BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip
    if step.chunks is not None:
        rows = step.chunks.step_rows
        output[rows] = mamba2_chunks(
            x[rows], dt[rows], b[rows], c[rows], weights, states, step.chunks
        )
    return output


@triton.jit
def _delta_kernel(
    query_ptr, key_ptr, value_ptr, g_ptr, beta_ptr, states_ptr, out_ptr, seq_lens_ptr, table_ptr,
    query_stride, key_stride, value_stride, state_stride, table_stride,
    shared_by, key_dim, value_dim, scale, eps,
    BLOCK_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program per request, head and part of the head's values."""
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k, v = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k, in_v = k < key_dim, v < value_dim
    row = request * tl.num_programs(1) + head
    out = out_ptr + row * value_dim + v
    seq_len = tl.load(seq_lens_ptr + request)
    if seq_len <= 0:  # padding
        tl.store(out, tl.zeros([BLOCK_V], tl.float32), mask=in_v)
        return
    table = table_ptr + request * table_stride
    place = (head * key_dim + k[:, None]) * value_dim + v[None, :]
    source = states_ptr + _find_state(table, seq_len - 2, BLOCK_SIZE) * state_stride + place
    target = states_ptr + _find_state(table, seq_len - 1, BLOCK_SIZE) * state_stride + place
    mask = in_k[:, None] & in_v[None, :]
    state = tl.where(seq_len > 1, tl.load(source, mask=mask, other=0.0), 0.0)

    own = head // shared_by * key_dim + k
    query = tl.load(query_ptr + request * query_stride + own, mask=in_k, other=0.0).to(tl.float32)
    key = tl.load(key_ptr + request * key_stride + own, mask=in_k, other=0.0).to(tl.float32)
    query = query * tl.rsqrt(tl.sum(query * query) + eps) * scale
    key = key * tl.rsqrt(tl.sum(key * key) + eps)
    value = tl.load(value_ptr + request * value_stride + head * value_dim + v, mask=in_v, other=0.0)
    state = state * tl.exp(tl.load(g_ptr + row))
    known = tl.sum(state * key[:, None], axis=0)
    change = (value.to(tl.float32) - known) * tl.load(beta_ptr + row)
    state += key[:, None] * change[None, :]
    tl.store(target, state, mask=mask)
    tl.store(out, tl.sum(state * query[:, None], axis=0), mask=in_v)


def gated_delta_rule(
    query: torch.Tensor,  # [num_tokens, key_heads, key_dim]
    key: torch.Tensor,
    value: torch.Tensor,  # [num_tokens, heads, value_dim]
    g: torch.Tensor,  # [num_tokens, heads] float32
    beta: torch.Tensor,  # [num_tokens, heads] float32
    states: torch.Tensor,  # [num_blocks, heads, key_dim, value_dim] float32
    step: StateStep,
) -> torch.Tensor:
    """As the reference."""
    output = torch.empty(value.shape, dtype=torch.float32, device=value.device)
    num, (_, heads, value_dim), (_, key_heads, key_dim) = step.num_decodes, value.shape, key.shape
    if num:
        assert all(t.stride()[1:] == (t.shape[2], 1) for t in (query, key, value))
        block_k = triton.next_power_of_2(key_dim)
        block_v = min(triton.next_power_of_2(value_dim), max(TILE // block_k, 1))
        _delta_kernel[(num, heads, triton.cdiv(value_dim, block_v))](
            query, key, value, g.contiguous(), beta.contiguous(), states, output,
            step.seq_lens, step.block_table,
            query.stride(0), key.stride(0), value.stride(0), states.stride(0),
            step.block_table.stride(0),
            heads // key_heads, key_dim, value_dim, key_dim**-0.5, EPS,
            BLOCK_SIZE=step.block_size, BLOCK_K=block_k, BLOCK_V=block_v, num_warps=4,
        )  # fmt: skip
    if step.chunks is not None:
        rows = step.chunks.step_rows
        output[rows] = delta_chunks(
            query[rows], key[rows], value[rows], g[rows], beta[rows], states, step.chunks
        )
    return output
