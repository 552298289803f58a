"""Causal attention over the paged KV cache: one kernel for decodes, one for longer queries.

Both pack the query heads that share a key head into the rows of one tile, so each cached key is
read once for all of them. A decode with drafts adds its few tokens to the same tile. Lengths are
read on the device, so a captured launch stays correct as sequences grow.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from penstock.ops.attention import UNSCALED, AttentionMetadata
from penstock.ops.triton.lookup import find_request
from penstock.ops.triton.overlap import begin, overlap
from penstock.ops.triton.prompt_attention import can_attend, prompt_attention
from penstock.ops.triton.softmax import add_tile, store_part
from penstock.ops.triton.tuning import decode_group_rows, decode_plan, prefill_tile

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _scores(q, k, scale, softcap, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Scaled scores in base 2. Without a cap, `scale` includes the change of base."""
    s = tl.dot(q, k, input_precision=PRECISION) * scale
    if SOFTCAP:
        s = softcap * (2.0 / (1.0 + tl.exp(-2.0 * s / softcap)) - 1.0) * LOG2_E  # softcap * tanh
    return s


@triton.jit
def _first_seen(positions, window, CHUNKED: tl.constexpr):
    """The first token (maybe negative) that the tokens at `positions` see in their window.

    If chunked, windows begin at multiples of their size.
    """
    first = positions - window + 1
    if CHUNKED:
        first = positions // window * window
    return first


@triton.jit
def _decode_kernel(
    q_ptr, cache_ptr, table_ptr, seq_lens_ptr, query_starts_ptr, sinks_ptr, out_ptr,
    partial_ptr,  # [requests, QUERIES, heads, SPLITS, HEAD_DIM] float32
    lse_ptr,  # [requests, QUERIES, heads, SPLITS] float32, base 2
    arrived_ptr,  # [requests, KV_HEADS] int32, zero before and after
    q_stride, out_stride, page_stride, table_stride, scale, softcap, window, value_scale,
    QUERIES: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    SPLITS: tl.constexpr, MIN_TILES: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One request of at most QUERIES tokens, one key head, one split of its cache.

    Requests with longer queries are skipped.

    The number of splits depends on the length of the cache, so that a long one does not delay
    others. The last program to finish a request's splits combines them.
    """
    begin(OVERLAP)
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(query_starts_ptr + request)
    query_len = tl.load(query_starts_ptr + request + 1) - start
    if (query_len == 0) | (query_len > QUERIES):
        return
    seq_len = tl.load(seq_lens_ptr + request)
    past = seq_len - query_len
    first = 0
    if WINDOW:
        first = tl.maximum(_first_seen(past, window, CHUNKED), 0) // TILE * TILE
    num_tiles = (seq_len - first + TILE - 1) // TILE
    tiles_each = tl.maximum((num_tiles + SPLITS - 1) // SPLITS, MIN_TILES)
    num_parts = (num_tiles + tiles_each - 1) // tiles_each
    if split >= num_parts:
        return
    low = first + split * tiles_each * TILE
    high = tl.minimum(low + tiles_each * TILE, seq_len)

    rows = tl.arange(0, QUERIES * GROUP_ROWS)
    dims = tl.arange(0, DIMS)
    queries = rows // GROUP_ROWS
    heads = kv_head * GROUP + rows % GROUP_ROWS
    positions = past + queries
    row_mask = (queries < query_len) & (rows % GROUP_ROWS < GROUP)
    dim_mask = dims < HEAD_DIM
    q_mask = row_mask[:, None] & dim_mask[None, :]
    at_row = (start + queries).to(tl.int64)
    q = tl.load(
        q_ptr + at_row[:, None] * q_stride + heads[:, None] * HEAD_DIM + dims[None, :],
        mask=q_mask, other=0.0,
    )  # fmt: skip
    best = tl.full([QUERIES * GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES * GROUP_ROWS], tl.float32)
    if SINKS:  # noqa: SIM102  known when compiled, unlike the part
        if split == 0:
            best = tl.load(sinks_ptr + heads, mask=row_mask, other=0.0).to(tl.float32) * LOG2_E
            total += 1.0
    acc = tl.zeros([QUERIES * GROUP_ROWS, DIMS], tl.float32)
    for at in range(low, high, TILE):
        tokens = at + tl.arange(0, TILE)
        valid = tokens < high
        if WINDOW:
            valid = valid & (tokens >= _first_seen(past, window, CHUNKED))
        page = tl.load(
            table_ptr + request.to(tl.int64) * table_stride + tokens // BLOCK_SIZE,
            mask=tokens < high, other=0,
        ).to(tl.int64)  # fmt: skip
        base = page * page_stride + (tokens % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM)
        base += kv_head * HEAD_DIM
        k = tl.load(
            cache_ptr + base[None, :] + dims[:, None],
            mask=valid[None, :] & dim_mask[:, None], other=0.0,
        )  # fmt: skip
        v = tl.load(
            cache_ptr + base[:, None] + BLOCK_SIZE * KV_HEADS * HEAD_DIM + dims[None, :],
            mask=valid[:, None] & dim_mask[None, :], other=0.0,
        )  # fmt: skip
        s = _scores(q, k.to(q.dtype), scale, softcap, SOFTCAP, PRECISION)
        seen = valid[None, :]
        if QUERIES > 1:
            seen = seen & (tokens[None, :] <= positions[:, None])
            if WINDOW:
                seen = seen & (tokens[None, :] >= _first_seen(positions, window, CHUNKED)[:, None])
        s = tl.where(seen, s, float("-inf"))
        # A tile may lie entirely before the window, or behind a row's own token.
        acc, best, total = add_tile(acc, best, total, s, v.to(q.dtype), True, PRECISION)
    at_out = at_row[:, None] * out_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    if num_parts == 1:
        out = (acc / total[:, None] * value_scale).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at_out, out, mask=q_mask)
    else:
        # A split without visible tokens has no weight in the softmax, and the sum 0.
        at_part = (request.to(tl.int64) * QUERIES + queries) * (KV_HEADS * GROUP) + heads
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        store_part(
            acc, best + tl.log2(total), partial_ptr, lse_ptr,
            arrived_ptr + request * KV_HEADS + kv_head, out_ptr + at_out, at_part * SPLITS, dims,
            row_mask, q_mask, split, num_parts, value_scale, HEAD_DIM, SPLITS,
        )  # fmt: skip


@triton.jit
def _prefill_tiles(
    acc, best, total, q, cache_ptr, table_ptr, positions, kv_head, low, high, seq_len,
    page_stride, scale, softcap, window,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The online softmax over cached tokens low..high; unmasked if every row sees all of them."""
    dims = tl.arange(0, DIMS)
    for at in range(low, high, TILE):
        tokens = at + tl.arange(0, TILE)
        if MASKED:
            page = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=tokens < seq_len, other=0)
        else:
            page = tl.load(table_ptr + tokens // BLOCK_SIZE)
        base = page.to(tl.int64) * page_stride
        base += (tokens % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
        k_at = cache_ptr + base[None, :] + dims[:, None]
        v_at = cache_ptr + base[:, None] + BLOCK_SIZE * KV_HEADS * HEAD_DIM + dims[None, :]
        if MASKED or DIMS != HEAD_DIM:
            there = (tokens < seq_len) if MASKED else (tokens >= 0)
            if WINDOW:  # tokens before every row's window may belong to another request by now
                there = there & (tokens >= _first_seen(tl.min(positions, 0), window, CHUNKED))
            dim_mask = dims < HEAD_DIM
            k = tl.load(k_at, mask=there[None, :] & dim_mask[:, None], other=0.0)
            v = tl.load(v_at, mask=there[:, None] & dim_mask[None, :], other=0.0)
        else:
            k = tl.load(k_at)
            v = tl.load(v_at)
        s = _scores(q, k.to(q.dtype), scale, softcap, SOFTCAP, PRECISION)
        if MASKED:
            seen = tokens[None, :] <= positions[:, None]
            if WINDOW:
                first = _first_seen(positions, window, CHUNKED)
                seen = seen & (tokens[None, :] >= first[:, None])
            s = tl.where(seen, s, float("-inf"))
        acc, best, total = add_tile(acc, best, total, s, v.to(q.dtype), MASKED, PRECISION)
    return acc, best, total


# Arguments that change per step must not trigger a new specialization.
@triton.jit(do_not_specialize=["first_request", "num_requests"])
def _prefill_kernel(
    q_ptr, cache_ptr, table_ptr, seq_lens_ptr, query_starts_ptr, sinks_ptr, out_ptr,
    q_stride, out_stride, page_stride, table_stride, first_request, num_requests,
    scale, softcap, window, value_scale,
    SKIPPED: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr,
    QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """QUERIES tokens of one request, for the query heads of one key head.

    Requests with at most SKIPPED tokens are left to the decode kernel.
    """
    # The last tiles of a long prompt do the most work: start them first.
    number = tl.num_programs(1) - 1 - tl.program_id(1)
    kv_head = tl.program_id(0)
    request, tile = find_request(query_starts_ptr, number, first_request, num_requests, QUERIES)
    start = tl.load(query_starts_ptr + request)
    query_len = tl.load(query_starts_ptr + request + 1) - start
    first_query = tile * QUERIES
    if first_query >= query_len:
        return
    if SKIPPED:  # noqa: SIM102  known when compiled, unlike the length
        if query_len <= SKIPPED:
            return
    seq_len = tl.load(seq_lens_ptr + request)
    past = seq_len - query_len

    rows = tl.arange(0, QUERIES * GROUP_ROWS)
    dims = tl.arange(0, DIMS)
    queries = first_query + rows // GROUP_ROWS
    heads = kv_head * GROUP + rows % GROUP_ROWS
    row_mask = (queries < query_len) & (rows % GROUP_ROWS < GROUP)
    mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    at = (start + queries).to(tl.int64)
    q = tl.load(
        q_ptr + at[:, None] * q_stride + heads[:, None] * HEAD_DIM + dims[None, :],
        mask=mask, other=0.0,
    )  # fmt: skip
    positions = past + queries
    best = tl.full([QUERIES * GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES * GROUP_ROWS], tl.float32)
    if SINKS:
        best = tl.load(sinks_ptr + heads, mask=row_mask, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    acc = tl.zeros([QUERIES * GROUP_ROWS, DIMS], tl.float32)
    # Every row sees the tokens before `clear`. After it, each row needs its mask.
    low = 0
    clear = (past + first_query + 1) // TILE * TILE
    high = tl.minimum(past + first_query + QUERIES, seq_len)
    table = table_ptr + request.to(tl.int64) * table_stride
    if WINDOW:
        low = tl.maximum(_first_seen(past + first_query, window, CHUNKED), 0) // TILE * TILE
        clear = low
    acc, best, total = _prefill_tiles(
        acc, best, total, q, cache_ptr, table, positions, kv_head, low, clear, seq_len,
        page_stride, scale, softcap, window, False, HEAD_DIM, DIMS, KV_HEADS, BLOCK_SIZE, TILE,
        WINDOW, CHUNKED, SOFTCAP, PRECISION,
    )  # fmt: skip
    acc, best, total = _prefill_tiles(
        acc, best, total, q, cache_ptr, table, positions, kv_head, clear, high, seq_len,
        page_stride, scale, softcap, window, True, HEAD_DIM, DIMS, KV_HEADS, BLOCK_SIZE, TILE,
        WINDOW, CHUNKED, SOFTCAP, PRECISION,
    )  # fmt: skip
    out = (acc / total[:, None] * value_scale).to(out_ptr.dtype.element_ty)
    at_out = at[:, None] * out_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + at_out, out, mask=mask)


def paged_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim], a token's heads contiguous
    cache: torch.Tensor,  # [num_blocks, 2, block_size, num_kv_heads, head_dim]
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [num_heads]
    key: torch.Tensor | None = None,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor | None = None,
    kv_scales: tuple[float, float] = UNSCALED,  # of an fp8 cache
    chunk: int | None = None,
) -> torch.Tensor:
    """Causal attention of each token to its request's cache: [num_tokens, num_heads, head_dim].

    As the reference, but with a window or a chunk, not both. If the step's `key` and `value` are
    given, which are already in the cache, new prompts read them directly instead of through the
    pages.
    """
    assert window is None or chunk is None
    local = _Local(window or chunk or 0, chunk is not None)
    num_tokens, num_heads, head_dim = query.shape
    output = torch.empty((num_tokens, num_heads, head_dim), dtype=query.dtype, device=query.device)
    num_done, num_skipped = metadata.num_decodes, metadata.decode_rows if metadata.any_order else 0
    # A tile holds only so many rows. Drafts of models with few key heads may be longer queries.
    group_rows = decode_group_rows(
        head_dim, query.element_size(), num_heads // cache.shape[3], metadata.decode_rows
    )
    if group_rows is None:
        num_done = num_skipped = 0
    elif num_done:
        _decode(query, cache, metadata, scale, local, softcap, sinks, kv_scales, output, group_rows)
    plain = not local.window and softcap is None and sinks is None
    plain = plain and cache.dtype in (query.dtype, torch.float8_e4m3fn)
    if metadata.num_prompts and plain and can_attend(query, key, value):
        assert key is not None
        assert value is not None
        prompt_attention(query, key, value, metadata, scale, output)
        num_done += metadata.num_prompts
    if metadata.max_query_len > 1 and (metadata.any_order or num_done < len(metadata.seq_lens)):
        done = num_done, num_skipped
        _prefill(query, cache, metadata, scale, local, softcap, sinks, kv_scales, output, *done)
    return output


class _Local(NamedTuple):
    """Which earlier tokens each token sees."""

    window: int  # 0: all
    is_chunked: bool  # windows begin at multiples of their size


def _decode(
    query: torch.Tensor,
    cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    local: _Local,
    softcap: float | None,
    sinks: torch.Tensor | None,
    kv_scales: tuple[float, float],
    output: torch.Tensor,
    group_rows: int,  # of a tile, for each token
) -> None:
    num_heads, head_dim = query.shape[1:]
    _, _, block_size, num_kv_heads, _ = cache.shape
    requests, queries = metadata.num_decodes, metadata.decode_rows
    plan = decode_plan(head_dim, query.element_size(), requests, num_kv_heads, queries, group_rows)
    shape = (requests, queries, num_heads, plan.splits)
    partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device)
    lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    arrived = metadata.arrived
    if arrived is None:
        arrived = torch.zeros(requests * num_kv_heads, dtype=torch.int32, device=query.device)
    assert len(arrived) >= requests * num_kv_heads
    _decode_kernel[(requests, num_kv_heads, plan.splits)](
        query, cache, metadata.block_table, metadata.seq_lens, metadata.query_starts,
        output if sinks is None else sinks, output, partial, lse, arrived,
        query.stride(0), output.stride(0), cache.stride(0), metadata.block_table.stride(0),
        _in_base_2(scale * kv_scales[0], softcap), softcap or 0.0, local.window, kv_scales[1],
        QUERIES=queries, GROUP=num_heads // num_kv_heads, GROUP_ROWS=group_rows,
        HEAD_DIM=head_dim, DIMS=max(triton.next_power_of_2(head_dim), 16),
        KV_HEADS=num_kv_heads, BLOCK_SIZE=block_size, TILE=plan.tile, SPLITS=plan.splits,
        MIN_TILES=plan.min_tiles,
        WINDOW=local.window > 0, CHUNKED=local.is_chunked, SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        PRECISION=_precision(query), **overlap(query.device),
        num_warps=plan.launch.num_warps, num_stages=plan.launch.num_stages,
    )  # fmt: skip


def _prefill(
    query: torch.Tensor,
    cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    local: _Local,
    softcap: float | None,
    sinks: torch.Tensor | None,
    kv_scales: tuple[float, float],
    output: torch.Tensor,
    num_done: int,  # leading requests that are already computed
    num_skipped: int,  # so are requests with at most this many tokens
) -> None:
    num_heads, head_dim = query.shape[1:]
    _, _, block_size, num_kv_heads, _ = cache.shape
    group = num_heads // num_kv_heads
    group_rows = triton.next_power_of_2(group)
    tile = prefill_tile(head_dim, query.element_size(), metadata.max_query_len)
    queries = max(tile.rows // group_rows, 1)
    # If decodes may be anywhere, all requests are visited and the decodes skipped.
    first = rows_done = 0
    if not metadata.any_order:
        first, rows_done = num_done, min(num_done, metadata.num_decodes)
        if num_done > metadata.num_decodes:
            rows_done += metadata.num_prompt_rows
    requests = len(metadata.seq_lens) - first
    num_tiles = (query.shape[0] - rows_done) // queries + requests
    _prefill_kernel[(num_kv_heads, num_tiles)](
        query, cache, metadata.block_table, metadata.seq_lens, metadata.query_starts,
        output if sinks is None else sinks, output,
        query.stride(0), output.stride(0), cache.stride(0), metadata.block_table.stride(0),
        first, requests, _in_base_2(scale * kv_scales[0], softcap), softcap or 0.0,
        local.window, kv_scales[1],
        SKIPPED=num_skipped, GROUP=group, GROUP_ROWS=group_rows, QUERIES=queries,
        HEAD_DIM=head_dim, DIMS=max(triton.next_power_of_2(head_dim), 16),
        KV_HEADS=num_kv_heads, BLOCK_SIZE=block_size, TILE=tile.tokens,
        WINDOW=local.window > 0, CHUNKED=local.is_chunked, SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        PRECISION=_precision(query),
        num_warps=tile.launch.num_warps, num_stages=tile.launch.num_stages,
    )  # fmt: skip


def _in_base_2(scale: float, softcap: float | None) -> float:
    """The scale for `_scores`: a cap applies before the change of base."""
    return scale * float(LOG2_E.value) if softcap is None else scale


def _precision(query: torch.Tensor) -> str:
    """Float32 stays exact: TF32 would not match the reference."""
    return "ieee" if query.dtype == torch.float32 else "tf32"
