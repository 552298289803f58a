"""Everything between latent attention's projections and attention itself, in one launch.

This is the norm of the compressed vector, rotary embedding of the queries and the key, and the
write of a token's entry to the paged cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rotated(at, cos, sin, mask, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both halves at `at` [rows, 1], rotated by cos and sin [1, HALF padded]."""
    dims = tl.arange(0, cos.shape[1])[None, :]
    if INTERLEAVED:
        first = tl.load(at + 2 * dims, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(at + 2 * dims + 1, mask=mask, other=0.0).to(tl.float32)
    else:
        first = tl.load(at + dims, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(at + HALF + dims, mask=mask, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _norm_rotate_latent_kernel(
    query_ptr,  # [n, num_heads, NOPE + 2 * HALF]
    compressed_ptr,  # [n, RANK + 2 * HALF]
    weight_ptr, cos_ptr, sin_ptr, cache_ptr, slot_ptr,
    rope_ptr,  # [n, num_heads, 2 * HALF]
    entry_ptr,  # [n, RANK + 2 * HALF]
    query_stride, compressed_stride, angle_stride, page_stride, num_heads, block_size, eps,
    NOPE: tl.constexpr, RANK: tl.constexpr, RANK_DIMS: tl.constexpr, HALF: tl.constexpr,
    HALF_DIMS: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """A token's first program makes its entry; the others rotate HEADS of its queries each."""
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, HALF_DIMS)[None, :]
    in_half = dims < HALF
    cos = tl.load(cos_ptr + token * angle_stride + dims, mask=in_half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * angle_stride + dims, mask=in_half, other=0.0).to(tl.float32)
    dtype = rope_ptr.dtype.element_ty
    if tl.program_id(1) == 0:
        slot = tl.load(slot_ptr + token)
        page = cache_ptr + (slot // block_size) * page_stride
        page += (slot % block_size) * (RANK + 2 * HALF)
        entry = entry_ptr + token * (RANK + 2 * HALF)
        source = compressed_ptr + token * compressed_stride
        rank_dims = tl.arange(0, RANK_DIMS)
        in_rank = rank_dims < RANK
        x = tl.load(source + rank_dims, mask=in_rank, other=0.0).to(tl.float32)
        normed = (x * tl.rsqrt(tl.sum(x * x) / RANK + eps)).to(dtype).to(tl.float32)
        weight = tl.load(weight_ptr + rank_dims, mask=in_rank, other=0.0).to(tl.float32)
        latent = (normed * weight).to(dtype)
        tl.store(entry + rank_dims, latent, mask=in_rank)
        tl.store(page + rank_dims, latent.to(cache_ptr.dtype.element_ty), mask=in_rank)
        key = source + RANK + tl.zeros([1, 1], tl.int32)
        key_first, key_second = _rotated(key, cos, sin, in_half, HALF, INTERLEAVED)
        key_first, key_second = key_first.to(dtype), key_second.to(dtype)
        tl.store(entry + RANK + dims, key_first, mask=in_half)
        tl.store(entry + RANK + HALF + dims, key_second, mask=in_half)
        cache_type = cache_ptr.dtype.element_ty
        tl.store(page + RANK + dims, key_first.to(cache_type), mask=in_half)
        tl.store(page + RANK + HALF + dims, key_second.to(cache_type), mask=in_half)
    else:
        heads = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)[:, None]
        mask = (heads < num_heads) & in_half
        at = query_ptr + token * query_stride + heads * (NOPE + 2 * HALF) + NOPE
        first, second = _rotated(at, cos, sin, mask, HALF, INTERLEAVED)
        out = rope_ptr + (token * num_heads + heads) * (2 * HALF)
        tl.store(out + dims, first.to(dtype), mask=mask)
        tl.store(out + HALF + dims, second.to(dtype), mask=mask)


def norm_rotate_latent(
    query: torch.Tensor,  # [n, heads, nope_dim + rope_dim], heads of a token contiguous
    compressed: torch.Tensor,  # [n, rank + rope_dim], rows contiguous
    weight: torch.Tensor,  # [rank]: the norm's
    eps: float,
    cos: torch.Tensor,  # [n, 1, rope_dim / 2]
    sin: torch.Tensor,
    interleaved: bool,
    cache: torch.Tensor,  # [num_blocks, block_size, rank + rope_dim]
    slot_mapping: torch.Tensor,  # [n] int64
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotated part of queries [n, heads, rope_dim] in halves layout, and the step's entries.

    The entries [n, rank + rope_dim] are also written to the cache.
    """
    n, num_heads, query_dim = query.shape
    rank, half = len(weight), cos.shape[-1]
    rope = torch.empty((n, num_heads, 2 * half), dtype=query.dtype, device=query.device)
    entries = torch.empty((n, rank + 2 * half), dtype=query.dtype, device=query.device)
    if n:
        heads_each = 16
        _norm_rotate_latent_kernel[(n, 1 + triton.cdiv(num_heads, heads_each))](
            query, compressed, weight, cos, sin, cache, slot_mapping, rope, entries,
            query.stride(0), compressed.stride(0), cos.stride(0), cache.stride(0),
            num_heads, cache.shape[1], eps,
            NOPE=query_dim - 2 * half, RANK=rank, RANK_DIMS=triton.next_power_of_2(rank),
            HALF=half, HALF_DIMS=triton.next_power_of_2(half), HEADS=heads_each,
            INTERLEAVED=interleaved, num_warps=2,
        )  # fmt: skip
    return rope, entries
