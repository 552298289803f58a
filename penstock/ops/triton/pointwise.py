"""Norms, optionally with the residual addition before them, SiLU·mul and the embedding gather.

Rounding follows the reference. Norms are computed in float32; RMSNorm is rounded before the weight
is applied. The sum of x and residual is rounded before the norm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.ops import reference
from penstock.ops.triton.overlap import begin, overlap


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, x_stride, size, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    dtype = x.dtype
    if ADD:
        residual = tl.load(residual_ptr + row * size + columns, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(residual_ptr + row * size + columns, x, mask=mask)
    x = x.to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x) / size + eps)).to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + columns, (normed * weight).to(dtype), mask=mask)


@triton.jit
def _layer_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, x_stride, residual_stride, size, eps,
    ADD: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    dtype = x.dtype
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
    x = x.to(tl.float32)
    centred = tl.where(mask, x - tl.sum(x) / size, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred) / size + eps)
    normed *= tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        normed += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + columns, normed.to(dtype), mask=mask)


@triton.jit
def _segment_sums_kernel(
    x_ptr, start_ptr, out_ptr, x_stride, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """COLUMNS of one segment."""
    segment = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.arange(0, ROWS)
    is_column = (columns < size)[None, :]
    start = tl.load(start_ptr + segment)
    end = tl.load(start_ptr + segment + 1)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in range(start, end, ROWS):
        source = x_ptr + (at + rows).to(tl.int64)[:, None] * x_stride + columns[None, :]
        mask = (at + rows < end)[:, None] & is_column
        acc += tl.load(source, mask=mask, other=0.0).to(tl.float32)
    target = out_ptr + segment.to(tl.int64) * size + columns
    tl.store(target, tl.sum(acc, axis=0), mask=columns < size)


@triton.jit
def _silu_mul_kernel(x_ptr, out_ptr, x_stride, size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * x_stride + size + columns, mask=mask, other=0.0)
    gate32 = gate.to(tl.float32)
    activated = (gate32 / (1.0 + tl.exp(-gate32))).to(gate.dtype).to(tl.float32)
    out = (activated * up.to(tl.float32)).to(gate.dtype)
    tl.store(out_ptr + row * size + columns, out, mask=mask)


@triton.jit
def _embed_kernel(token_ptr, weight_ptr, out_ptr, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ptr + row).to(tl.int64)
    mask = columns < size
    values = tl.load(weight_ptr + token * size + columns, mask=mask, other=0.0)
    tl.store(out_ptr + row * size + columns, values, mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, computed in float32."""
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    _launch_norm(rows, None, weight, out, eps)
    return out.view(x.shape)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, and the sum, which overwrites the residual."""
    assert x.dim() == 2
    assert residual.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x, residual, weight, out, eps)
    return out, residual


def _launch_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
) -> None:
    num_rows, size = x.shape
    if num_rows == 0:
        return
    block = triton.next_power_of_2(size)
    _rms_norm_kernel[(num_rows,)](
        x, residual if residual is not None else x, weight, out, x.stride(0), size, eps,
        ADD=residual is not None, BLOCK=block, **overlap(x.device),
        num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference."""
    if x.dim() != 2 or weight.dim() != 1 or x.stride(1) != 1:
        return reference.layer_norm(x, weight, bias, eps, residual)
    num_rows, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_rows:
        other = x if residual is None else residual
        assert other.stride(1) == 1
        block = triton.next_power_of_2(size)
        _layer_norm_kernel[(num_rows,)](
            x, other, weight, weight if bias is None else bias, out,
            x.stride(0), other.stride(0), size, eps,
            ADD=residual is not None, BIAS=bias is not None, BLOCK=block, **overlap(x.device),
            num_warps=min(max(block // 512, 1), 16),
        )  # fmt: skip
    return out


def segment_sums(x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """[num_segments, size] float32: sums of x's rows from each start to the next.

    starts [num_segments + 1] are on the device: the host does not wait for them.
    """
    num_segments, size = len(starts) - 1, x.shape[1]
    out = torch.empty((num_segments, size), dtype=torch.float32, device=x.device)
    _segment_sums_kernel[(num_segments, triton.cdiv(size, 64))](
        x, starts, out, x.stride(0), size, ROWS=64, COLUMNS=64, num_warps=4
    )
    return out


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up. x [n, 2 * d] holds gate and up side by side -> [n, d]."""
    assert x.stride(1) == 1, "rows may lie apart, their numbers not"
    num_rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if num_rows:
        block = min(triton.next_power_of_2(size), 1024)
        grid = (num_rows, triton.cdiv(size, block))
        _silu_mul_kernel[grid](
            x, out, x.stride(0), size, BLOCK=block, **overlap(x.device), num_warps=4
        )
    return out


def embed(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows of `weight`. token_ids [n] -> [n, hidden]."""
    num_rows, size = len(token_ids), weight.shape[1]
    out = torch.empty((num_rows, size), dtype=weight.dtype, device=weight.device)
    if num_rows:
        block = min(triton.next_power_of_2(size), 2048)
        grid = (num_rows, triton.cdiv(size, block))
        _embed_kernel[grid](token_ids, weight, out, size, BLOCK=block, num_warps=4)
    return out
