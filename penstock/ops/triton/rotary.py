"""Everything between the QKV projection and attention, in one pass over its output.

This is the norms on queries and keys if the model has them, rotary embedding, and the write of keys
and values to the paged cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.ops.attention import UNSCALED
from penstock.ops.triton.overlap import begin, overlap


@triton.jit
def _norm_rotate_write_kernel(
    qkv_ptr,  # [n, (num_heads + 2 * num_kv_heads) * 2 * HALF], changed in place
    q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, cache_ptr, slot_ptr,
    qkv_stride, cos_stride, page_stride, num_heads, num_kv_heads, block_size, eps,
    key_factor, value_factor,  # factors of what is cached in fp8
    NORM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, FP8: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program handles HEADS heads of one token, of query, key and value alike."""
    begin(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, HALF)
    exists = (heads < num_heads + 2 * num_kv_heads)[:, None]
    is_query = (heads < num_heads)[:, None]
    is_value = (heads >= num_heads + num_kv_heads)[:, None]
    at = qkv_ptr + token * qkv_stride + heads[:, None] * (2 * HALF) + dims[None, :]
    first = tl.load(at, mask=exists, other=0.0)  # [HEADS, HALF]
    second = tl.load(at + HALF, mask=exists, other=0.0)
    dtype = first.dtype
    one, two = first.to(tl.float32), second.to(tl.float32)
    if NORM:
        square = tl.sum(one * one, axis=1) + tl.sum(two * two, axis=1)
        scale = tl.rsqrt(square / (2 * HALF) + eps)[:, None]
        one = (one * scale).to(dtype).to(tl.float32)
        two = (two * scale).to(dtype).to(tl.float32)
        q_one = tl.load(q_weight_ptr + dims).to(tl.float32)[None, :]
        q_two = tl.load(q_weight_ptr + HALF + dims).to(tl.float32)[None, :]
        k_one = tl.load(k_weight_ptr + dims).to(tl.float32)[None, :]
        k_two = tl.load(k_weight_ptr + HALF + dims).to(tl.float32)[None, :]
        one = (one * tl.where(is_query, q_one, k_one)).to(dtype).to(tl.float32)
        two = (two * tl.where(is_query, q_two, k_two)).to(dtype).to(tl.float32)
    cos = tl.load(cos_ptr + token * cos_stride + dims).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * cos_stride + dims).to(tl.float32)[None, :]
    first = tl.where(is_value, first, (one * cos - two * sin).to(dtype))
    second = tl.where(is_value, second, (two * cos + one * sin).to(dtype))
    rotated = exists & (is_value == 0)
    tl.store(at, first, mask=rotated)
    tl.store(at + HALF, second, mask=rotated)
    # The page holds the keys of the whole block, then its values.
    slot = tl.load(slot_ptr + token)
    kv_head = tl.where(
        is_value, heads[:, None] - num_heads - num_kv_heads, heads[:, None] - num_heads
    )
    row = (slot % block_size) * num_kv_heads + kv_head
    row += tl.where(is_value, block_size * num_kv_heads, 0)
    page = cache_ptr + (slot // block_size) * page_stride + row * (2 * HALF) + dims[None, :]
    cached = exists & (is_query == 0)
    if FP8:
        factor = tl.where(is_value, value_factor, key_factor)
        first = tl.clamp(first.to(tl.float32) * factor, -448.0, 448.0)
        second = tl.clamp(second.to(tl.float32) * factor, -448.0, 448.0)
    tl.store(page, first.to(cache_ptr.dtype.element_ty), mask=cached)
    tl.store(page + HALF, second.to(cache_ptr.dtype.element_ty), mask=cached)


def norm_rotate_write(
    qkv: torch.Tensor,  # [n, (num_heads + 2 * num_kv_heads) * head_dim], changed in place
    q_weight: torch.Tensor | None,  # [head_dim], or None without norms
    k_weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,  # [n, 1, head_dim / 2]
    sin: torch.Tensor,
    cache: torch.Tensor,  # [num_blocks, 2, block_size, num_kv_heads, head_dim]
    slot_mapping: torch.Tensor,  # [n] int64
    num_heads: int,
    kv_scales: tuple[float, float] = UNSCALED,  # of an fp8 cache
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value [n, heads, head_dim] as views of `qkv`: normed, rotated and cached."""
    num_kv_heads, head_dim = cache.shape[3], cache.shape[4]
    assert cos.shape[-1] * 2 == head_dim, "rotary embeddings must span the whole head"
    n, num_all = qkv.shape[0], num_heads + 2 * num_kv_heads
    if n:
        heads_each = 1 if n <= 64 else 8  # for few tokens, one program per head fills the chip
        _norm_rotate_write_kernel[(n, triton.cdiv(num_all, heads_each))](
            qkv, qkv if q_weight is None else q_weight, qkv if k_weight is None else k_weight,
            cos, sin, cache, slot_mapping, qkv.stride(0), cos.stride(0), cache.stride(0),
            num_heads, num_kv_heads, cache.shape[2], eps, 1.0 / kv_scales[0], 1.0 / kv_scales[1],
            NORM=q_weight is not None, HALF=head_dim // 2, HEADS=heads_each,
            FP8=cache.dtype == torch.float8_e4m3fn, **overlap(qkv.device),
            num_warps=1 if heads_each == 1 else 4,
        )  # fmt: skip
    heads = qkv.view(n, num_all, head_dim)
    query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    return query, key, value
