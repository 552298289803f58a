"""Experts in GGUF quantization blocks, over tokens sorted by expert as in experts.py.

An expert's tokens are multiplied with its rows on the tensor cores, a few tokens at a time. The
weights are rounded to the type of x in registers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from penstock.ops.experts import ACTIVATIONS
from penstock.ops.triton.experts import place, sum_experts
from penstock.ops.triton.gguf_decode import ONE, load_weights, scales, values
from penstock.ops.triton.gguf_layout import Planes
from penstock.ops.triton.pointwise import silu_mul
from penstock.ops.triton.routing import Blocks, align
from penstock.ops.triton.tuning_gguf import GgufExpertsPlan, gguf_experts_plan


@triton.jit
def _multiply(
    acc,  # [ROWS, TOKENS] float32
    x_at,  # [QUADS * 4, TOKENS] pointers to x: the first plane's columns of quad 0
    is_token,  # [TOKENS]
    words_ptr, high_ptr, first_ptr, second_ptr, third_ptr,
    row, is_row, in_features, one,  # row [ROWS] int64
    KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ZERO: tl.constexpr,
    GROUP: tl.constexpr, TABLE: tl.constexpr, OFFSET: tl.constexpr, EVEN: tl.constexpr,
    QUADS: tl.constexpr,
):  # fmt: skip
    """acc + weights x, plane by plane on the tensor cores."""
    dtype: tl.constexpr = x_at.dtype.element_ty
    PLANES: tl.constexpr = 32 // LOW
    EACH: tl.constexpr = GROUP // 4 if GROUP // 4 < PLANES else PLANES
    word = tl.arange(0, QUADS * 4)
    x_column = word // 4 * (128 // LOW) + word % 4
    for first_quad in range(0, in_features * LOW // 128, QUADS):
        words, high, fields = load_weights(
            words_ptr, high_ptr, first_ptr, second_ptr, third_ptr,
            row[:, None], is_row[:, None], word[None, :], (word // 4)[None, :], first_quad,
            in_features, KIND, LOW, HIGH, GROUP,
        )  # fmt: skip
        for part in tl.static_range(PLANES // EACH):
            scale, offset = scales(fields[part], KIND)
            for index in tl.static_range(EACH):
                weight = values(
                    words, high, scale, offset, one, part * EACH + index,
                    LOW, HIGH, ZERO, TABLE, OFFSET,
                )  # fmt: skip
                at = first_quad * (128 // LOW) + (part * EACH + index) * 4
                mask = is_token[None, :]
                if not EVEN:
                    mask = mask & (at + x_column < in_features)[:, None]
                x = tl.load(x_at + at, mask=mask, other=0.0)
                acc = tl.dot(weight.to(dtype), x, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_blocks", "one"])
def _experts_kernel(
    x_ptr, words_ptr, high_ptr, first_ptr, second_ptr, third_ptr, out_ptr, factor_ptr,
    pair_ptr, expert_ptr, rows_ptr, out_stride, in_features, out_features, num_blocks, one,
    KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ZERO: tl.constexpr,
    GROUP: tl.constexpr, TABLE: tl.constexpr, OFFSET: tl.constexpr, TOP_K: tl.constexpr,
    SORTED: tl.constexpr, EVEN: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    QUADS: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """A token block of one expert, times ROWS rows of its matrix.

    SORTED: x is in block order; the result is multiplied by the routing weight and stored at its
    pair. Otherwise x is in token order, and the result in block order.
    """
    block, column = place(num_blocks, tl.cdiv(out_features, ROWS), GROUPED)
    num_rows = tl.load(rows_ptr + block)
    if num_rows <= 0:
        return
    token = tl.arange(0, TOKENS)
    is_token = token < num_rows
    pair = tl.load(pair_ptr + block * TOKENS + token, mask=is_token, other=0)
    row = column * ROWS + tl.arange(0, ROWS)
    is_row = row < out_features
    own_row = tl.load(expert_ptr + block).to(tl.int64) * out_features + row
    place_of = block * TOKENS + token
    source = place_of if SORTED else pair // TOP_K
    target = pair if SORTED else place_of
    word = tl.arange(0, QUADS * 4)
    x_column = word // 4 * (128 // LOW) + word % 4
    x_at = x_ptr + source.to(tl.int64)[None, :] * in_features + x_column[:, None]
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    acc = _multiply(
        acc, x_at, is_token, words_ptr, high_ptr, first_ptr, second_ptr, third_ptr,
        own_row, is_row, in_features, one,
        KIND, LOW, HIGH, ZERO, GROUP, TABLE, OFFSET, EVEN, QUADS,
    )  # fmt: skip
    if SORTED:
        acc *= tl.load(factor_ptr + pair, mask=is_token, other=0.0)[None, :]
    at = out_ptr + target.to(tl.int64)[:, None] * out_stride + row[None, :]
    mask = is_token[:, None] & is_row[None, :]
    tl.store(at, acc.T.to(out_ptr.dtype.element_ty), mask=mask)


def gguf_experts(
    x: torch.Tensor,  # [n, hidden]
    weights: torch.Tensor,  # [n, top_k] float32
    ids: torch.Tensor,  # [n, top_k]
    gate_up: Sequence[Planes],  # gate above up of each expert; or all gates, and all ups
    down: Planes,  # [experts * hidden, intermediate]
    activation: str,
) -> torch.Tensor:
    """As the reference. Nothing waits for the routing result on the host."""
    num_tokens, top_k = ids.shape
    if num_tokens == 0:
        return torch.empty_like(x)
    hidden = x.shape[1]
    num_experts, size = down.shape[0] // hidden, down.shape[1]
    plan = gguf_experts_plan(num_tokens * top_k, num_experts, x.element_size())
    blocks = align(ids, num_experts, plan.tokens)
    both = torch.empty((len(blocks.pairs), 2 * size), dtype=x.dtype, device=x.device)
    each = 2 * size // len(gate_up)
    for index, matrix in enumerate(gate_up):
        part = both[:, index * each : (index + 1) * each]
        _run(x.contiguous(), matrix, part, None, blocks, top_k, plan)
    if activation == "silu":
        activated = silu_mul(both)
    else:
        activated = ACTIVATIONS[activation](*both.chunk(2, dim=-1)).contiguous()
    weighted = torch.empty((num_tokens * top_k, hidden), dtype=x.dtype, device=x.device)
    _run(activated, down, weighted, weights, blocks, top_k, plan)
    return sum_experts(weighted, ids, num_experts)


def _run(
    x: torch.Tensor,
    weight: Planes,
    out: torch.Tensor,
    factors: torch.Tensor | None,  # [n, top_k]: x is sorted, out is not
    blocks: Blocks,
    top_k: int,
    plan: GgufExpertsPlan,
) -> None:
    num_blocks, out_features = len(blocks.experts), out.shape[1]
    num_quads = weight.num_quads
    _experts_kernel[(num_blocks * triton.cdiv(out_features, plan.rows),)](
        x, *weight.pointers, out, out if factors is None else factors,
        blocks.pairs, blocks.experts, blocks.rows, out.stride(0), weight.shape[1], out_features,
        num_blocks, ONE, **weight.constants, TOP_K=top_k, SORTED=factors is not None,
        EVEN=num_quads % plan.quads == 0, TOKENS=plan.tokens, ROWS=plan.rows, QUADS=plan.quads,
        GROUPED=plan.group, num_warps=plan.launch.num_warps, num_stages=plan.launch.num_stages,
    )  # fmt: skip
