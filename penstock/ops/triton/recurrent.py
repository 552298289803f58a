"""Kernels of recurrent layers for single tokens and drafts: states are read and written in place.

The host needs to know only the size of the step, so a captured graph can hold them. Longer queries
use the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.ops.delta_net import EPS, delta_chunks
from penstock.ops.mamba2 import SpaceWeights, mamba2_chunks
from penstock.ops.recurrent import StateStep
from penstock.ops.triton.causal_conv import (
    causal_conv,
    draft_lengths,
    find_rows,
    find_state,
    is_kept,
    new_output,
)

__all__ = ["causal_conv", "gated_delta_rule", "mamba2_scan"]

TILE = 4096  # numbers of a state in the registers of one program


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), accurate to a few bits near 0 and near x."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, log1p)


@triton.jit
def _mamba2_token(
    state, row, head, p, n, in_p, in_n,
    x_ptr, dt_ptr, b_ptr, c_ptr, a_ptr, d_ptr, dt_bias_ptr,
    x_stride, dt_stride, b_stride, c_stride,
    heads_per_group, head_dim, state_size, dt_low, dt_high,
):  # fmt: skip
    """The state after a row's token, and its output."""
    x = tl.load(x_ptr + row * x_stride + head * head_dim + p, mask=in_p, other=0.0)
    x = x.to(tl.float32)
    group = head // heads_per_group * state_size + n
    b = tl.load(b_ptr + row * b_stride + group, mask=in_n, other=0.0).to(tl.float32)
    c = tl.load(c_ptr + row * c_stride + group, mask=in_n, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + row * dt_stride + head).to(tl.float32)
    dt = _softplus(dt + tl.load(dt_bias_ptr + head))
    dt = tl.minimum(tl.maximum(dt, dt_low), dt_high)
    decay = tl.exp(dt * tl.load(a_ptr + head))
    state = state * decay + (x * dt)[:, None] * b[None, :]
    return state, tl.sum(state * c[None, :], axis=1) + tl.load(d_ptr + head) * x


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
    source = states_ptr + find_state(table, seq_len - 2, BLOCK_SIZE) * state_stride + place
    target = states_ptr + find_state(table, seq_len - 1, BLOCK_SIZE) * state_stride + place
    mask = in_p[:, None] & in_n[None, :]
    state = tl.where(seq_len > 1, tl.load(source, mask=mask, other=0.0), 0.0)
    state, y = _mamba2_token(
        state, request, head, p, n, in_p, in_n,
        x_ptr, dt_ptr, b_ptr, c_ptr, a_ptr, d_ptr, dt_bias_ptr,
        x_stride, dt_stride, b_stride, c_stride,
        heads_per_group, head_dim, state_size, dt_low, dt_high,
    )  # fmt: skip
    tl.store(target, state, mask=mask)
    tl.store(out, y, mask=in_p)


@triton.jit
def _mamba2_drafts_kernel(
    x_ptr, dt_ptr, b_ptr, c_ptr, a_ptr, d_ptr, dt_bias_ptr, states_ptr, out_ptr,
    starts_ptr, seq_lens_ptr, table_ptr, accepted_ptr,
    x_stride, dt_stride, b_stride, c_stride, state_stride, table_stride,
    heads_per_group, head_dim, state_size, dt_low, dt_high,
    BLOCK_SIZE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, REPLAY: tl.constexpr,
):  # fmt: skip
    """As `_mamba2_kernel`, token by token."""
    request, head = tl.program_id(0), tl.program_id(1)
    p, n = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    in_p, in_n = p < head_dim, n < state_size
    mask = in_p[:, None] & in_n[None, :]
    row, position, first, end = find_rows(starts_ptr, seq_lens_ptr, accepted_ptr, request, REPLAY)
    if first >= end:  # padding, or nothing to replay
        return
    table = table_ptr + request.to(tl.int64) * table_stride
    states = states_ptr + (head * head_dim + p[:, None]) * state_size + n[None, :]
    source = states + find_state(table, position + first - 1, BLOCK_SIZE) * state_stride
    state = tl.where(position + first > 0, tl.load(source, mask=mask, other=0.0), 0.0)
    for index in range(first, end):
        state, y = _mamba2_token(
            state, row + index, head, p, n, in_p, in_n,
            x_ptr, dt_ptr, b_ptr, c_ptr, a_ptr, d_ptr, dt_bias_ptr,
            x_stride, dt_stride, b_stride, c_stride,
            heads_per_group, head_dim, state_size, dt_low, dt_high,
        )  # fmt: skip
        if is_kept(index, end, position, BLOCK_SIZE, REPLAY):
            block = find_state(table, position + index, BLOCK_SIZE)
            tl.store(states + block * state_stride, state, mask=mask)
        if not REPLAY:
            out = out_ptr + ((row + index) * tl.num_programs(1) + head) * head_dim + p
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
    output = new_output(x, torch.float32, step)
    num, (_, heads, head_dim), (_, groups, state_size) = step.num_decodes, x.shape, b.shape
    assert all(t.stride()[1:] == (t.shape[2], 1) for t in (x, b, c))
    assert dt.stride(1) == 1
    block_n = triton.next_power_of_2(state_size)
    block_p = min(triton.next_power_of_2(head_dim), max(TILE // block_n, 1))
    if num:
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
    if step.drafts is not None:
        rows, num = step.drafts.step_rows, len(step.drafts.seq_lens)
        _mamba2_drafts_kernel[(num, heads, triton.cdiv(head_dim, block_p))](
            x[rows], dt[rows], b[rows], c[rows], weights.a, weights.d, weights.dt_bias, states,
            output[rows], *draft_lengths(step.drafts),
            x.stride(0), dt.stride(0), b.stride(0), c.stride(0), states.stride(0),
            step.drafts.block_table.stride(0),
            heads // groups, head_dim, state_size, *weights.dt_limit,
            BLOCK_SIZE=step.block_size, BLOCK_P=block_p, BLOCK_N=block_n,
            REPLAY=step.drafts.num_accepted is not None, num_warps=4,
        )  # fmt: skip
    return output


@triton.jit
def _delta_token(
    state, row, head, k, v, in_k, in_v,
    query_ptr, key_ptr, value_ptr, g_ptr, beta_ptr,
    query_stride, key_stride, value_stride, gate_stride,
    shared_by, key_dim, value_dim, scale, eps,
):  # fmt: skip
    """The state after a row's token, and its output."""
    own = head // shared_by * key_dim + k
    query = tl.load(query_ptr + row * query_stride + own, mask=in_k, other=0.0).to(tl.float32)
    key = tl.load(key_ptr + row * key_stride + own, mask=in_k, other=0.0).to(tl.float32)
    query = query * tl.rsqrt(tl.sum(query * query) + eps) * scale
    key = key * tl.rsqrt(tl.sum(key * key) + eps)
    value = tl.load(value_ptr + row * value_stride + head * value_dim + v, mask=in_v, other=0.0)
    state = state * tl.exp(tl.load(g_ptr + row * gate_stride + head))
    known = tl.sum(state * key[:, None], axis=0)
    change = (value.to(tl.float32) - known) * tl.load(beta_ptr + row * gate_stride + head)
    state += key[:, None] * change[None, :]
    return state, tl.sum(state * query[:, None], axis=0)


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
    out = out_ptr + (request * tl.num_programs(1) + head) * value_dim + v
    seq_len = tl.load(seq_lens_ptr + request)
    if seq_len <= 0:  # padding
        tl.store(out, tl.zeros([BLOCK_V], tl.float32), mask=in_v)
        return
    table = table_ptr + request * table_stride
    place = (head * key_dim + k[:, None]) * value_dim + v[None, :]
    source = states_ptr + find_state(table, seq_len - 2, BLOCK_SIZE) * state_stride + place
    target = states_ptr + find_state(table, seq_len - 1, BLOCK_SIZE) * state_stride + place
    mask = in_k[:, None] & in_v[None, :]
    state = tl.where(seq_len > 1, tl.load(source, mask=mask, other=0.0), 0.0)
    state, y = _delta_token(
        state, request, head, k, v, in_k, in_v, query_ptr, key_ptr, value_ptr, g_ptr, beta_ptr,
        query_stride, key_stride, value_stride, tl.num_programs(1),
        shared_by, key_dim, value_dim, scale, eps,
    )  # fmt: skip
    tl.store(target, state, mask=mask)
    tl.store(out, y, mask=in_v)


@triton.jit
def _delta_drafts_kernel(
    query_ptr, key_ptr, value_ptr, g_ptr, beta_ptr, states_ptr, out_ptr,
    starts_ptr, seq_lens_ptr, table_ptr, accepted_ptr,
    query_stride, key_stride, value_stride, state_stride, table_stride,
    shared_by, key_dim, value_dim, scale, eps,
    BLOCK_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, REPLAY: tl.constexpr,
):  # fmt: skip
    """As `_delta_kernel`, token by token."""
    request, head = tl.program_id(0), tl.program_id(1)
    k, v = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k, in_v = k < key_dim, v < value_dim
    mask = in_k[:, None] & in_v[None, :]
    row, position, first, end = find_rows(starts_ptr, seq_lens_ptr, accepted_ptr, request, REPLAY)
    if first >= end:  # padding, or nothing to replay
        return
    table = table_ptr + request.to(tl.int64) * table_stride
    states = states_ptr + (head * key_dim + k[:, None]) * value_dim + v[None, :]
    source = states + find_state(table, position + first - 1, BLOCK_SIZE) * state_stride
    state = tl.where(position + first > 0, tl.load(source, mask=mask, other=0.0), 0.0)
    for index in range(first, end):
        state, y = _delta_token(
            state, row + index, head, k, v, in_k, in_v,
            query_ptr, key_ptr, value_ptr, g_ptr, beta_ptr,
            query_stride, key_stride, value_stride, tl.num_programs(1),
            shared_by, key_dim, value_dim, scale, eps,
        )  # fmt: skip
        if is_kept(index, end, position, BLOCK_SIZE, REPLAY):
            block = find_state(table, position + index, BLOCK_SIZE)
            tl.store(states + block * state_stride, state, mask=mask)
        if not REPLAY:
            out = out_ptr + ((row + index) * tl.num_programs(1) + head) * value_dim + v
            tl.store(out, y, mask=in_v)


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
    output = new_output(value, torch.float32, step)
    num, (_, heads, value_dim), (_, key_heads, key_dim) = step.num_decodes, value.shape, key.shape
    assert all(t.stride()[1:] == (t.shape[2], 1) for t in (query, key, value))
    block_k = triton.next_power_of_2(key_dim)
    block_v = min(triton.next_power_of_2(value_dim), max(TILE // block_k, 1))
    if num:
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
    if step.drafts is not None:
        rows, num = step.drafts.step_rows, len(step.drafts.seq_lens)
        _delta_drafts_kernel[(num, heads, triton.cdiv(value_dim, block_v))](
            query[rows], key[rows], value[rows], g[rows].contiguous(), beta[rows].contiguous(),
            states, output[rows], *draft_lengths(step.drafts),
            query.stride(0), key.stride(0), value.stride(0), states.stride(0),
            step.drafts.block_table.stride(0),
            heads // key_heads, key_dim, value_dim, key_dim**-0.5, EPS,
            BLOCK_SIZE=step.block_size, BLOCK_K=block_k, BLOCK_V=block_v,
            REPLAY=step.drafts.num_accepted is not None, num_warps=4,
        )  # fmt: skip
    return output
