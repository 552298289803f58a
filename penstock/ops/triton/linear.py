"""A matrix times one row, where cuBLAS leaves much of the bandwidth unused.

More rows go to cuBLAS, which uses the tensor cores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.ops import reference
from penstock.ops.triton.overlap import begin, overlap
from penstock.ops.triton.tuning import row_tile


@triton.jit
def _one_row_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, in_features, out_features,
    BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """ROWS rows of the weight times x. Products are summed across threads once, at the end."""
    begin(OVERLAP)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    row_mask = rows < out_features
    source = weight_ptr + rows.to(tl.int64)[:, None] * in_features + columns[None, :]
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for at in range(0, in_features, BLOCK):
        mask = at + columns < in_features
        weight = tl.load(
            source + at, mask=row_mask[:, None] & mask[None, :], other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        x = tl.load(x_ptr + at + columns, mask=mask, other=0.0)
        acc += weight.to(tl.float32) * x.to(tl.float32)[None, :]
    out = tl.sum(acc, axis=1)
    if BIAS:
        out += tl.load(bias_ptr + rows, mask=row_mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, out.to(out_ptr.dtype.element_ty), mask=row_mask)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [n, in] @ weight [out, in]^T + bias; in `out` [n, out] if given."""
    if x.shape[0] != 1 or not weight.is_contiguous() or not x.is_contiguous():
        return reference.linear(x, weight, bias, out)
    out_features, in_features = weight.shape
    if out is None:
        out = torch.empty((1, out_features), dtype=x.dtype, device=x.device)
    tile = row_tile(in_features)
    _one_row_kernel[(triton.cdiv(out_features, tile.rows),)](
        x, weight, weight if bias is None else bias, out, in_features, out_features,
        BIAS=bias is not None, ROWS=tile.rows, BLOCK=tile.columns, **overlap(x.device),
        num_warps=tile.launch.num_warps, num_stages=tile.launch.num_stages,
    )  # fmt: skip
    return out
