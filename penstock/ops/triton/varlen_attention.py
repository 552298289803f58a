"""Bidirectional attention inside each request of a packed batch, without a cache.

Lengths are read only on the device, so steps can be captured. Rows behind the last request are not
written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.ops.triton.lookup import find_request
from penstock.ops.triton.tuning import varlen_tile

LOG2_E = 1.4426950408889634


@triton.jit
def _attend(
    q, best, total, acc, k_ptr, v_ptr, at, queries, start, length, k_stride, v_stride, column,
    in_head, scale, reach,
    TILE: tl.constexpr, MASKED: tl.constexpr, HAS_REACH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax, over TILE tokens. Not MASKED: all of them are seen."""
    tokens = at + tl.arange(0, TILE)
    mask = in_head
    if MASKED:
        mask = mask & (tokens < length)[:, None]
    rows = (start + tokens).to(tl.int64)[:, None]
    k = tl.load(k_ptr + rows * k_stride + column, mask=mask, other=0.0)
    s = tl.dot(q, k.T, input_precision=PRECISION) * scale
    if MASKED:
        seen = (tokens < length)[None, :]
        if HAS_REACH:
            seen = seen & (tl.abs(tokens[None, :] - queries[:, None]) <= reach)
        s = tl.where(seen, s, float("-inf"))
    new_best = tl.maximum(best, tl.max(s, axis=1))
    base = new_best
    if MASKED:  # a row that has seen no token yet: avoid inf - inf
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
    p = tl.exp2(s - base[:, None])
    weight = tl.exp2(best - base)
    total = total * weight + tl.sum(p, axis=1)
    v = tl.load(v_ptr + rows * v_stride + column, mask=mask, other=0.0)
    acc = tl.dot(p.to(v.dtype), v, acc * weight[:, None], input_precision=PRECISION)
    return new_best, total, acc


# Arguments that change per step must not trigger a new specialization.
@triton.jit(do_not_specialize=["num_requests", "num_rows"])
def _varlen_kernel(
    q_ptr, k_ptr, v_ptr, query_starts_ptr, out_ptr, q_stride, k_stride, v_stride, out_stride,
    num_requests, num_rows, scale, reach,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, HAS_REACH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """QUERIES tokens of one request by one head."""
    head = tl.program_id(0)
    request, tile = find_request(query_starts_ptr, tl.program_id(1), 0, num_requests, QUERIES)
    start = tl.load(query_starts_ptr + request)
    length = tl.minimum(tl.load(query_starts_ptr + request + 1), num_rows) - start
    first = tile * QUERIES
    if first >= length:
        return
    dims = tl.arange(0, WIDTH)
    queries = first + tl.arange(0, QUERIES)
    in_head = dims[None, :] < HEAD_DIM
    mask = (queries < length)[:, None] & in_head
    rows = (start + queries).to(tl.int64)[:, None]
    column = head * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + rows * q_stride + column, mask=mask, other=0.0)
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, WIDTH], tl.float32)
    low, high = 0, length
    if HAS_REACH:
        low = tl.maximum(first - reach, 0) // TILE * TILE
        high = tl.minimum(first + QUERIES + reach, length)
    kv_column = head // GROUP * HEAD_DIM + dims[None, :]
    whole = low if HAS_REACH else high // TILE * TILE  # up to here, nothing is masked
    for at in range(low, whole, TILE):
        best, total, acc = _attend(
            q, best, total, acc, k_ptr, v_ptr, at, queries, start, length, k_stride, v_stride,
            kv_column, in_head, scale, reach, TILE, False, HAS_REACH, PRECISION,
        )  # fmt: skip
    for at in range(whole, high, TILE):
        best, total, acc = _attend(
            q, best, total, acc, k_ptr, v_ptr, at, queries, start, length, k_stride, v_stride,
            kv_column, in_head, scale, reach, TILE, True, HAS_REACH, PRECISION,
        )  # fmt: skip
    total = tl.where(total == 0.0, 1.0, total)  # rows behind the end of the request
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows * out_stride + column, out, mask=mask)


def varlen_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor,
    query_starts: torch.Tensor,  # [num_requests + 1]
    scale: float,
    reach: int | None = None,
) -> torch.Tensor:
    """As the reference. Rows that belong to no request are undefined."""
    num_tokens, num_heads, head_dim = query.shape
    query, key, value = (_with_dense_heads(x) for x in (query, key, value))
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    num_requests = len(query_starts) - 1
    tile = varlen_tile(query.element_size(), head_dim, num_tokens, num_heads)
    num_tiles = num_tokens // tile.rows + num_requests
    _varlen_kernel[(num_heads, num_tiles)](
        query, key, value, query_starts, output,
        query.stride(0), key.stride(0), value.stride(0), output.stride(0),
        num_requests, num_tokens, scale * LOG2_E, 0 if reach is None else reach,
        GROUP=num_heads // key.shape[1], QUERIES=tile.rows, HEAD_DIM=head_dim,
        WIDTH=max(triton.next_power_of_2(head_dim), 16), TILE=tile.tokens,
        HAS_REACH=reach is not None, PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tile.launch.num_warps, num_stages=tile.launch.num_stages,
    )  # fmt: skip
    return output


def _with_dense_heads(x: torch.Tensor) -> torch.Tensor:
    is_dense = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if is_dense else x.contiguous()
