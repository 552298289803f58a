"""Latent attention: absorbed over the paged cache; `latent_prompt_attention.py` for new prompts.

The rows of a tile are heads, or a few tokens by heads. A latent vector is loaded once for all rows,
as their key and value. Lengths are read on the device, so a captured launch stays correct as
sequences grow. `penstock.ops.latent_attention` explains the two forms.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.ops.attention import AttentionMetadata
from penstock.ops.latent_attention import absorb_keys, expand_values
from penstock.ops.triton.latent_prompt_attention import LOG2_E, latent_prompt_attention, padded
from penstock.ops.triton.lookup import find_request
from penstock.ops.triton.softmax import add_tile, store_part
from penstock.ops.triton.tuning import latent_decode_plan, latent_prefill_tile


@triton.jit
def _latent_tiles(
    acc, best, total, q, q_rope, cache_ptr, table_ptr, positions, low, high, page_stride, scale,
    MASKED: tl.constexpr, RANK: tl.constexpr, DIMS: tl.constexpr, ROPE: tl.constexpr,
    ROPE_DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr, MAY_BE_EMPTY: tl.constexpr = False,
):  # fmt: skip
    """The online softmax over cached tokens low..high; unmasked if every row sees all of them.

    MAY_BE_EMPTY: rows may see none of them.
    """
    dims, rope_dims = tl.arange(0, DIMS), tl.arange(0, ROPE_DIMS)
    for at in range(low, high, TILE):
        tokens = at + tl.arange(0, TILE)
        there = tokens < high
        page = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        base = cache_ptr + page * page_stride + (tokens % BLOCK_SIZE) * (RANK + ROPE)
        latent = tl.load(
            base[:, None] + dims[None, :], mask=there[:, None] & (dims < RANK)[None, :], other=0.0
        ).to(q.dtype)
        rope = tl.load(
            base[:, None] + RANK + rope_dims[None, :],
            mask=there[:, None] & (rope_dims < ROPE)[None, :], other=0.0,
        ).to(q.dtype)  # fmt: skip
        s = tl.dot(q, tl.trans(latent), input_precision=PRECISION)
        s = tl.dot(q_rope, tl.trans(rope), s, input_precision=PRECISION) * scale
        if MASKED:
            s = tl.where(there[None, :] & (tokens[None, :] <= positions[:, None]), s, float("-inf"))
        acc, best, total = add_tile(acc, best, total, s, latent, MAY_BE_EMPTY, PRECISION)
    return acc, best, total


@triton.jit
def _load_queries(
    q_ptr, q_rope_ptr, rows, heads, row_mask, HEADS: tl.constexpr, RANK: tl.constexpr,
    DIMS: tl.constexpr, ROPE: tl.constexpr, ROPE_DIMS: tl.constexpr,
):  # fmt: skip
    """Queries of these rows and heads: [n, DIMS] for latent vectors, and [n, ROPE_DIMS]."""
    dims, rope_dims = tl.arange(0, DIMS), tl.arange(0, ROPE_DIMS)
    at = rows.to(tl.int64) * HEADS + heads
    q = tl.load(
        q_ptr + at[:, None] * RANK + dims[None, :],
        mask=row_mask[:, None] & (dims < RANK)[None, :], other=0.0,
    )  # fmt: skip
    q_rope = tl.load(
        q_rope_ptr + at[:, None] * ROPE + rope_dims[None, :],
        mask=row_mask[:, None] & (rope_dims < ROPE)[None, :], other=0.0,
    )  # fmt: skip
    return q, q_rope


@triton.jit
def _decode_kernel(
    q_ptr,  # [rows, HEADS, RANK]
    q_rope_ptr,  # [rows, HEADS, ROPE]
    cache_ptr, table_ptr, seq_lens_ptr, query_starts_ptr,
    out_ptr,  # [rows, HEADS, RANK]
    partial_ptr,  # [requests, QUERIES, HEADS, SPLITS, RANK] float32
    lse_ptr,  # [requests, QUERIES, HEADS, SPLITS] float32, base 2
    arrived_ptr,  # [requests, head groups] int32, zero before and after
    page_stride, table_stride, scale,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr,
    DIMS: tl.constexpr, ROPE: tl.constexpr, ROPE_DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """ROWS heads of a request with at most QUERIES tokens, one split of its cache.

    Requests with longer queries are skipped. The last program to finish a request's splits combines
    them.
    """
    request, head_group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(query_starts_ptr + request)
    query_len = tl.load(query_starts_ptr + request + 1) - start
    # The heads of all tokens, one token after the other.
    heads = head_group * ROWS + tl.arange(0, ROWS)
    if (query_len > QUERIES) | (head_group * ROWS >= query_len * HEADS):
        return
    seq_len = tl.load(seq_lens_ptr + request)
    num_tiles = (seq_len + TILE - 1) // TILE
    tiles_each = tl.maximum((num_tiles + SPLITS - 1) // SPLITS, MIN_TILES)
    num_parts = (num_tiles + tiles_each - 1) // tiles_each
    if split >= num_parts:
        return
    low = split * tiles_each * TILE
    high = tl.minimum(low + tiles_each * TILE, seq_len)

    dims = tl.arange(0, DIMS)
    row_mask = heads < query_len * HEADS
    mask = row_mask[:, None] & (dims < RANK)[None, :]
    rows = tl.full([ROWS], 0, tl.int32) + start
    q, q_rope = _load_queries(
        q_ptr, q_rope_ptr, rows, heads, row_mask, HEADS, RANK, DIMS, ROPE, ROPE_DIMS
    )
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    positions = seq_len - query_len + heads // HEADS
    acc, best, total = _latent_tiles(
        acc, best, total, q, q_rope, cache_ptr, table_ptr + request.to(tl.int64) * table_stride,
        positions, low, high, page_stride, scale, True, RANK, DIMS, ROPE, ROPE_DIMS, BLOCK_SIZE,
        TILE, PRECISION, QUERIES > 1,
    )  # fmt: skip
    if QUERIES > 1:  # the last split may hold nothing that the first tokens see
        total_or_one = tl.where(total == 0.0, 1.0, total)
        acc = acc / total_or_one[:, None]
    else:
        acc = acc / total[:, None]
    at_out = out_ptr + (start.to(tl.int64) * HEADS + heads)[:, None] * RANK + dims[None, :]
    if num_parts == 1:
        tl.store(at_out, acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        at_part = (request.to(tl.int64) * (QUERIES * HEADS) + heads) * SPLITS
        store_part(
            acc, best + tl.log2(total), partial_ptr, lse_ptr,
            arrived_ptr + request * tl.num_programs(1) + head_group, at_out, at_part, dims,
            row_mask, mask, split, num_parts, 1.0, RANK, SPLITS,
        )  # fmt: skip


# Arguments that change per step must not trigger a new specialization.
@triton.jit(do_not_specialize=["first_request", "num_requests", "first_row"])
def _prefill_kernel(
    q_ptr, q_rope_ptr, cache_ptr, table_ptr, seq_lens_ptr, query_starts_ptr, out_ptr,
    page_stride, table_stride, first_request, num_requests, first_row, scale,
    SKIPPED: tl.constexpr, HEADS: tl.constexpr, HEAD_ROWS: tl.constexpr,
    QUERIES: tl.constexpr, RANK: tl.constexpr, DIMS: tl.constexpr, ROPE: tl.constexpr,
    ROPE_DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """QUERIES tokens of one request, by HEAD_ROWS heads.

    Queries begin at the step's `first_row`. Requests with at most SKIPPED tokens are left to the
    decode kernel.
    """
    # The last tiles of a long prompt do the most work: start them first.
    number = tl.num_programs(1) - 1 - tl.program_id(1)
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

    rows = tl.arange(0, QUERIES * HEAD_ROWS)
    dims = tl.arange(0, DIMS)
    queries = first_query + rows // HEAD_ROWS
    heads = tl.program_id(0) * HEAD_ROWS + rows % HEAD_ROWS
    row_mask = (queries < query_len) & (heads < HEADS)
    at = start - first_row + queries
    q, q_rope = _load_queries(
        q_ptr, q_rope_ptr, at, heads, row_mask, HEADS, RANK, DIMS, ROPE, ROPE_DIMS
    )
    positions = past + queries
    best = tl.full([QUERIES * HEAD_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES * HEAD_ROWS], tl.float32)
    acc = tl.zeros([QUERIES * HEAD_ROWS, DIMS], tl.float32)
    # Every row sees the tokens before `clear`. After it, each row needs its mask.
    clear = (past + first_query + 1) // TILE * TILE
    high = tl.minimum(past + first_query + QUERIES, seq_len)
    table = table_ptr + request.to(tl.int64) * table_stride
    acc, best, total = _latent_tiles(
        acc, best, total, q, q_rope, cache_ptr, table, positions, 0, clear, page_stride, scale,
        False, RANK, DIMS, ROPE, ROPE_DIMS, BLOCK_SIZE, TILE, PRECISION,
    )  # fmt: skip
    acc, best, total = _latent_tiles(
        acc, best, total, q, q_rope, cache_ptr, table, positions, clear, high, page_stride, scale,
        True, RANK, DIMS, ROPE, ROPE_DIMS, BLOCK_SIZE, TILE, PRECISION,
    )  # fmt: skip
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    at_out = (at.to(tl.int64) * HEADS + heads)[:, None] * RANK + dims[None, :]
    tl.store(out_ptr + at_out, out, mask=row_mask[:, None] & (dims < RANK)[None, :])


def latent_attention(
    nope: torch.Tensor,  # [num_tokens, heads, nope_dim]
    rope: torch.Tensor,  # [num_tokens, heads, rope_dim]
    cache: torch.Tensor,  # [num_blocks, block_size, rank + rope_dim]
    metadata: AttentionMetadata,
    up: torch.Tensor,  # [heads, nope_dim + value_dim, rank]
    scale: float,
    entries: torch.Tensor | None = None,  # [num_tokens, rank + rope_dim]: of this step
) -> torch.Tensor:
    """As the reference: [num_tokens, heads, value_dim].

    New prompts are expanded from the step's own entries. Everything else is absorbed.
    """
    num_tokens, num_heads, nope_dim = nope.shape
    rope = rope.contiguous()
    output = torch.empty(
        (num_tokens, num_heads, up.shape[1] - nope_dim), dtype=nope.dtype, device=nope.device
    )
    decodes, requests = metadata.num_decodes, len(metadata.seq_lens)
    step = _Step(nope, rope, cache, metadata, up, scale * LOG2_E, output)
    if not metadata.num_prompts or entries is None:
        has_longer = metadata.max_query_len > 1 and (metadata.any_order or decodes < requests)
        step.absorbed(slice(0, num_tokens), decodes > 0, has_longer)
        return output
    end = decodes + metadata.num_prompt_rows
    latent_prompt_attention(nope, rope, entries, metadata, up, scale, output)
    if decodes:
        step.absorbed(slice(0, decodes), True, False)
    if decodes + metadata.num_prompts < requests:
        step.absorbed(slice(end, num_tokens), False, True)
    return output


class _Step:
    """The tensors of one call. `scale` is for scores in base 2."""

    def __init__(
        self,
        nope: torch.Tensor,
        rope: torch.Tensor,
        cache: torch.Tensor,
        metadata: AttentionMetadata,
        up: torch.Tensor,
        scale: float,
        output: torch.Tensor,
    ) -> None:
        self.nope, self.rope, self.cache, self.metadata = nope, rope, cache, metadata
        self.up, self.scale, self.output = up, scale, output
        self.rank, self.rope_dim = up.shape[2], rope.shape[2]
        # Float32 stays exact: TF32 would not match the reference.
        self.precision = "ieee" if nope.dtype == torch.float32 else "tf32"

    def absorbed(self, rows: slice, has_single: bool, has_longer: bool) -> None:
        """Attention of the requests with these rows: decodes, longer queries, or both."""
        query, rope = absorb_keys(self.nope[rows], self.up), self.rope[rows]
        latent = torch.empty_like(query)
        if has_single:
            self._decode(query, rope, latent)
        if has_longer:
            self._prefill(query, rope, latent, rows.start)
        expand_values(latent, self.up, self.output[rows])

    def _decode(self, query: torch.Tensor, rope: torch.Tensor, latent: torch.Tensor) -> None:
        metadata, num_heads = self.metadata, query.shape[1]
        requests, queries = metadata.num_decodes, metadata.decode_rows
        plan = latent_decode_plan(queries * num_heads, query.element_size(), requests)
        groups = triton.cdiv(queries * num_heads, plan.rows)
        shape = (requests, queries * num_heads, plan.splits)
        is_split = plan.splits > 1
        partial = torch.empty(
            (*shape, self.rank) if is_split else 1, dtype=torch.float32, device=query.device
        )
        lse = torch.empty(shape if is_split else 1, dtype=torch.float32, device=query.device)
        arrived = metadata.arrived
        if arrived is None or len(arrived) < requests * groups:
            arrived = torch.zeros(requests * groups, dtype=torch.int32, device=query.device)
        _decode_kernel[(requests, groups, plan.splits)](
            query, rope, self.cache, metadata.block_table, metadata.seq_lens,
            metadata.query_starts, latent, partial, lse, arrived,
            self.cache.stride(0), metadata.block_table.stride(0), self.scale,
            QUERIES=queries, HEADS=num_heads, ROWS=plan.rows, SPLITS=plan.splits,
            MIN_TILES=plan.min_tiles, TILE=plan.tile, **self._sizes(),
            num_warps=plan.launch.num_warps, num_stages=plan.launch.num_stages,
        )  # fmt: skip

    def _prefill(
        self, query: torch.Tensor, rope: torch.Tensor, latent: torch.Tensor, first_row: int
    ) -> None:
        metadata, num_heads = self.metadata, query.shape[1]
        tile = latent_prefill_tile(query.element_size())
        head_rows = min(triton.next_power_of_2(num_heads), tile.rows)
        queries = tile.rows // head_rows
        # If decodes may be anywhere, all requests are visited and the decodes skipped.
        first = rows_done = 0
        if not metadata.any_order:
            first = rows_done = metadata.num_decodes
            if first_row:
                first, rows_done = first + metadata.num_prompts, first_row
        requests = len(metadata.seq_lens) - first
        num_tiles = (first_row + len(query) - rows_done) // queries + requests
        _prefill_kernel[(triton.cdiv(num_heads, head_rows), num_tiles)](
            query, rope, self.cache, metadata.block_table, metadata.seq_lens,
            metadata.query_starts, latent, self.cache.stride(0), metadata.block_table.stride(0),
            first, requests, first_row, self.scale,
            SKIPPED=metadata.decode_rows if metadata.any_order else 0, HEADS=num_heads,
            HEAD_ROWS=head_rows, QUERIES=queries, TILE=tile.tokens, **self._sizes(),
            num_warps=tile.launch.num_warps, num_stages=tile.launch.num_stages,
        )  # fmt: skip

    def _sizes(self) -> dict[str, int | str]:
        return {
            "RANK": self.rank, "DIMS": padded(self.rank), "ROPE": self.rope_dim,
            "ROPE_DIMS": padded(self.rope_dim), "BLOCK_SIZE": self.cache.shape[1],
            "PRECISION": self.precision,
        }  # fmt: skip
