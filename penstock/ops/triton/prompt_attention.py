"""Causal attention of prompts with nothing in the cache: keys and values are contiguous.

Without pages, a tile of keys is one rectangle, which TMA fetches by itself. Data behind a prompt's
last token belongs to the next prompt, and the causal mask hides it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from penstock.ops.attention import AttentionMetadata
from penstock.ops.triton.lookup import find_request
from penstock.ops.triton.tuning import prompt_tile

LOG2_E = 1.4426950408889634


@triton.jit
def _prompt_tiles(
    acc, best, total, q, keys, values, queries, column, start, low, high, scale,
    MASKED: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The online softmax over tokens low..high; unmasked if every row sees all of them."""
    for at in range(low, high, TILE):
        k = keys.load([start + at, column])
        s = tl.dot(q, k.T, input_precision=PRECISION)
        if MASKED:
            tokens = at + tl.arange(0, TILE)
            s = tl.where(tokens[None, :] <= queries[:, None], s, float("-inf"))
        new_best = tl.maximum(best, tl.max(s, axis=1) * scale)
        p = tl.exp2(s * scale - new_best[:, None])
        weight = tl.exp2(best - new_best)
        total = total * weight + tl.sum(p, axis=1)
        acc = acc * weight[:, None]
        v = values.load([start + at, column])
        acc = tl.dot(p.to(q.dtype), v, acc, input_precision=PRECISION)
        best = new_best
    return acc, best, total


# Arguments that change per step must not trigger a new specialization.
@triton.jit(do_not_specialize=["first_request", "num_requests"])
def _prompt_kernel(
    q_ptr, keys, values, query_starts_ptr, out_ptr, q_stride, out_stride,
    first_request, num_requests, scale,
    GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """QUERIES tokens of one prompt, for the query heads of one key head."""
    # The last tiles of a long prompt do the most work: start them first.
    number = tl.num_programs(1) - 1 - tl.program_id(1)
    kv_head = tl.program_id(0)
    request, tile = find_request(query_starts_ptr, number, first_request, num_requests, QUERIES)
    start = tl.load(query_starts_ptr + request)
    length = tl.load(query_starts_ptr + request + 1) - start
    first = tile * QUERIES
    if first >= length:
        return
    rows = tl.arange(0, QUERIES * GROUP_ROWS)
    dims = tl.arange(0, HEAD_DIM)
    queries = first + rows // GROUP_ROWS
    heads = kv_head * GROUP + rows % GROUP_ROWS
    mask = ((queries < length) & (rows % GROUP_ROWS < GROUP))[:, None]
    at = (start + queries).to(tl.int64)
    q = tl.load(
        q_ptr + at[:, None] * q_stride + heads[:, None] * HEAD_DIM + dims[None, :],
        mask=mask, other=0.0,
    )  # fmt: skip
    best = tl.full([QUERIES * GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES * GROUP_ROWS], tl.float32)
    acc = tl.zeros([QUERIES * GROUP_ROWS, HEAD_DIM], tl.float32)
    # Every row sees the tokens before `clear`. After it, each row needs its mask.
    clear = (first + 1) // TILE * TILE
    high = tl.minimum(first + QUERIES, length)
    column = kv_head * HEAD_DIM
    acc, best, total = _prompt_tiles(
        acc, best, total, q, keys, values, queries, column, start, 0, clear, scale,
        False, TILE, PRECISION,
    )  # fmt: skip
    acc, best, total = _prompt_tiles(
        acc, best, total, q, keys, values, queries, column, start, clear, high, scale,
        True, TILE, PRECISION,
    )  # fmt: skip
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    at_out = at[:, None] * out_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + at_out, out, mask=mask)


def can_attend(query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None) -> bool:
    """Whether keys and values are given, with sizes and addresses that TMA supports."""
    head_dim = query.shape[2]
    if head_dim < 16 or head_dim & (head_dim - 1):
        return False
    for tensor in (key, value):
        if tensor is None:
            return False
        is_dense = tensor.stride(2) == 1 and tensor.stride(1) == head_dim
        if not is_dense or tensor.data_ptr() % 16 or tensor.stride(0) * tensor.element_size() % 16:
            return False
    return True


def prompt_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim], a token's heads contiguous
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim], likewise
    value: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    output: torch.Tensor,  # [num_tokens, num_heads, head_dim]; rows of other requests are unchanged
) -> None:
    """Attention of the step's `num_prompts` prompts to their own tokens."""
    num_tokens, num_kv_heads, head_dim = key.shape
    group = query.shape[1] // num_kv_heads
    group_rows = triton.next_power_of_2(group)
    tile = prompt_tile(query.element_size(), metadata.max_query_len)
    queries = max(tile.rows // group_rows, 1)

    def rectangles(heads: torch.Tensor) -> TensorDescriptor:
        shape, strides = [num_tokens, num_kv_heads * head_dim], [heads.stride(0), 1]
        return TensorDescriptor(heads, shape, strides, [tile.tokens, head_dim])

    num_tiles = metadata.num_prompt_rows // queries + metadata.num_prompts
    _prompt_kernel[(num_kv_heads, num_tiles)](
        query, rectangles(key), rectangles(value), metadata.query_starts, output,
        query.stride(0), output.stride(0), metadata.num_decodes, metadata.num_prompts,
        scale * LOG2_E, GROUP=group, GROUP_ROWS=group_rows, QUERIES=queries, HEAD_DIM=head_dim,
        TILE=tile.tokens, PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tile.launch.num_warps, num_stages=tile.launch.num_stages,
    )  # fmt: skip
