"""Latent attention of prompts with nothing in the cache: keys and values are expanded.

cuBLAS expands them from the step's own entries. The rows of a tile are tokens of one head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from penstock.ops.attention import AttentionMetadata
from penstock.ops.triton.lookup import find_request
from penstock.ops.triton.softmax import add_tile
from penstock.ops.triton.tuning import latent_prompt_tile

LOG2_E = 1.4426950408889634


@triton.jit
def _prompt_tiles(
    acc, best, total, q, q_rope, key_ptr, key_rope_ptr, queries, length, low, high, scale,
    both_stride, entry_stride,
    MASKED: tl.constexpr, NOPE: tl.constexpr, NOPE_DIMS: tl.constexpr, ROPE: tl.constexpr,
    ROPE_DIMS: tl.constexpr, VALUE: tl.constexpr, VALUE_DIMS: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The online softmax over a prompt's tokens low..high; unmasked if every row sees them."""
    nope_dims, rope_dims = tl.arange(0, NOPE_DIMS), tl.arange(0, ROPE_DIMS)
    value_dims = tl.arange(0, VALUE_DIMS)
    for at in range(low, high, TILE):
        tokens = at + tl.arange(0, TILE)
        there = (tokens < length)[:, None]
        both = key_ptr + tokens.to(tl.int64)[:, None] * both_stride
        key = tl.load(
            both + nope_dims[None, :], mask=there & (nope_dims < NOPE)[None, :], other=0.0
        )
        key_rope = tl.load(
            key_rope_ptr + tokens.to(tl.int64)[:, None] * entry_stride + rope_dims[None, :],
            mask=there & (rope_dims < ROPE)[None, :], other=0.0,
        )  # fmt: skip
        s = tl.dot(q, tl.trans(key), input_precision=PRECISION)
        s = tl.dot(q_rope, tl.trans(key_rope), s, input_precision=PRECISION) * scale
        if MASKED:
            s = tl.where(tokens[None, :] <= queries[:, None], s, float("-inf"))
        value = tl.load(
            both + NOPE + value_dims[None, :],
            mask=there & (value_dims < VALUE)[None, :], other=0.0,
        )  # fmt: skip
        acc, best, total = add_tile(acc, best, total, s, value, False, PRECISION)
    return acc, best, total


@triton.jit(do_not_specialize=["first_request", "num_requests", "first_row"])
def _prompt_kernel(
    q_ptr,  # [n, heads, NOPE], the last stride is 1
    q_rope_ptr,  # [n, heads, ROPE]
    both_ptr,  # [prompt rows, heads, NOPE + VALUE]: keys and values, from first_row on
    key_rope_ptr,  # [n, ...]
    query_starts_ptr,
    out_ptr,  # [n, heads, VALUE]
    q_stride, q_head_stride, entry_stride, first_request, num_requests, first_row, scale,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, NOPE: tl.constexpr, NOPE_DIMS: tl.constexpr,
    ROPE: tl.constexpr, ROPE_DIMS: tl.constexpr, VALUE: tl.constexpr, VALUE_DIMS: tl.constexpr,
    TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """QUERIES tokens of one prompt, one head."""
    number = tl.num_programs(1) - 1 - tl.program_id(1)
    head = tl.program_id(0)
    request, tile = find_request(query_starts_ptr, number, first_request, num_requests, QUERIES)
    start = tl.load(query_starts_ptr + request).to(tl.int64)
    length = (tl.load(query_starts_ptr + request + 1) - start).to(tl.int32)
    first = tile * QUERIES
    if first >= length:
        return
    queries = first + tl.arange(0, QUERIES)
    nope_dims, rope_dims = tl.arange(0, NOPE_DIMS), tl.arange(0, ROPE_DIMS)
    value_dims = tl.arange(0, VALUE_DIMS)
    row_mask = (queries < length)[:, None]
    at = (start + queries)[:, None]
    q = tl.load(
        q_ptr + at * q_stride + head * q_head_stride + nope_dims[None, :],
        mask=row_mask & (nope_dims < NOPE)[None, :], other=0.0,
    )  # fmt: skip
    q_rope = tl.load(
        q_rope_ptr + (at * HEADS + head) * ROPE + rope_dims[None, :],
        mask=row_mask & (rope_dims < ROPE)[None, :], other=0.0,
    )  # fmt: skip
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, VALUE_DIMS], tl.float32)
    both_stride = HEADS * (NOPE + VALUE)
    key = both_ptr + (start - first_row) * both_stride + head * (NOPE + VALUE)
    key_rope = key_rope_ptr + start * entry_stride
    # Every row sees the tokens before `clear`. After it, each row needs its mask.
    clear = (first + 1) // TILE * TILE
    high = tl.minimum(first + QUERIES, length)
    acc, best, total = _prompt_tiles(
        acc, best, total, q, q_rope, key, key_rope, queries, length, 0, clear, scale,
        both_stride, entry_stride, False, NOPE, NOPE_DIMS, ROPE, ROPE_DIMS, VALUE, VALUE_DIMS,
        TILE, PRECISION,
    )  # fmt: skip
    acc, best, total = _prompt_tiles(
        acc, best, total, q, q_rope, key, key_rope, queries, length, clear, high, scale,
        both_stride, entry_stride, True, NOPE, NOPE_DIMS, ROPE, ROPE_DIMS, VALUE, VALUE_DIMS,
        TILE, PRECISION,
    )  # fmt: skip
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    at_out = (at * HEADS + head) * VALUE + value_dims[None, :]
    tl.store(out_ptr + at_out, out, mask=row_mask & (value_dims < VALUE)[None, :])


def latent_prompt_attention(
    nope: torch.Tensor,  # [num_tokens, heads, nope_dim]
    rope: torch.Tensor,  # [num_tokens, heads, rope_dim], contiguous
    entries: torch.Tensor,  # [num_tokens, rank + rope_dim]: of this step
    metadata: AttentionMetadata,
    up: torch.Tensor,  # [heads, nope_dim + value_dim, rank]
    scale: float,
    output: torch.Tensor,  # [num_tokens, heads, value_dim]; rows of other requests are unchanged
) -> None:
    """Attention of the step's `num_prompts` prompts to their own tokens."""
    num_heads, nope_dim = nope.shape[1:]
    value_dim, rank, rope_dim = output.shape[2], up.shape[2], rope.shape[2]
    first_row = metadata.num_decodes
    own = entries[first_row : first_row + metadata.num_prompt_rows, :rank]
    both = F.linear(own, up.flatten(0, 1))  # [prompt rows, heads * (nope + value)]
    tile = latent_prompt_tile(nope.element_size(), padded(max(nope_dim, value_dim)))
    num_tiles = metadata.num_prompt_rows // tile.rows + metadata.num_prompts
    _prompt_kernel[(num_heads, num_tiles)](
        nope, rope, both, entries[:, rank:], metadata.query_starts, output,
        nope.stride(0), nope.stride(1), entries.stride(0),
        metadata.num_decodes, metadata.num_prompts, first_row, scale * LOG2_E,
        HEADS=num_heads, QUERIES=tile.rows, NOPE=nope_dim, NOPE_DIMS=padded(nope_dim),
        ROPE=rope_dim, ROPE_DIMS=padded(rope_dim), VALUE=value_dim, VALUE_DIMS=padded(value_dim),
        TILE=tile.tokens, PRECISION="ieee" if nope.dtype == torch.float32 else "tf32",
        num_warps=tile.launch.num_warps, num_stages=tile.launch.num_stages,
    )  # fmt: skip


def padded(size: int) -> int:
    """The tile width for this many columns: a power of two, at least 16."""
    return max(1 << (size - 1).bit_length(), 16)
