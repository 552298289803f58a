"""Attention over a paged KV cache and over variable-length batches: the torch reference.

A layer's cache is ``[num_blocks, 2, block_size, num_kv_heads, entry]``: a page holds the keys, then
the values of a block's tokens. An entry is the `head_dim` numbers of one head. In an int8 cache,
four more bytes hold the entry's float32 scale. An fp8 cache (e4m3) has two scales per layer, one
for keys and one for values, which are stored outside of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from penstock.protocol.kv import INT8_SCALE_BYTES

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
UNSCALED = (1.0, 1.0)


@dataclass(frozen=True)
class HostLens:
    """The lengths of a step that the host knows."""

    query_starts: npt.NDArray[np.int64]  # [num_requests + 1]
    seq_lens: npt.NDArray[np.int64]  # [num_requests], exact if there are no drafts


@dataclass(frozen=True)
class AttentionMetadata:
    """The rows, lengths and block tables of a step, for the layers of one KV group."""

    query_starts: torch.Tensor  # [num_requests + 1] int32: first row of each request, and the end
    seq_lens: torch.Tensor  # [num_requests] int32: tokens in the cache after this step
    block_table: torch.Tensor  # [num_requests, max_blocks] int32
    slot_mapping: torch.Tensor  # [num_tokens] int64: block * block_size + offset of each row
    num_decodes: int  # leading requests that compute `decode_rows` tokens each, at most
    max_query_len: int
    max_seq_len: int  # an upper bound while steps are in flight
    any_order: bool = False  # a captured step: the number of decodes is unknown
    num_prompts: int = 0  # requests after the decodes, with nothing in the cache yet
    num_prompt_rows: int = 0  # tokens of those requests
    decode_rows: int = 1  # a power of two; more than one in padded steps that verify drafts
    arrived: torch.Tensor | None = None  # [requests * kv_heads] int32 zeros: counters for kernels
    host_lens: HostLens | None = None  # without it, lengths are read from the device, which waits
    # The last requests of an unpadded step, which compute one token and drafts after it.
    num_drafting: int = 0


@dataclass(frozen=True)
class SpanRows:
    """Rows of a step that see all tokens of their request up to `end`."""

    request: int  # in the step
    rows: slice
    first: int  # position of the first row
    end: int  # position
    in_window: bool = True  # whether a window limits how far back they see


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: tuple[float, float] = UNSCALED,
) -> None:
    """Store a step's keys and values [n, kv_heads, head_dim] at their slots in the cache.

    For fp8, values are divided by their scale and clipped to the range.
    """
    block_size = cache.shape[2]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    for index, (x, scale) in enumerate(zip((key, value), kv_scales, strict=True)):
        if cache.dtype == FP8:  # as bytes: few ops support fp8
            numbers = (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
            cache.view(torch.uint8)[block, index, offset] = numbers.view(torch.uint8)
        elif cache.dtype == torch.int8:
            cache[block, index, offset] = to_int8_entries(x)
        else:
            cache[block, index, offset] = x.to(cache.dtype)


def to_int8_entries(x: torch.Tensor) -> torch.Tensor:
    """Quantize heads [..., head_dim] to int8, each with its own scale: [..., head_dim + 4] int8.

    The entries of a token depend only on its own keys and values. A head with a non-finite number
    gets the scale NaN, so that the error stays visible.
    """
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True)
    finite = largest.isfinite()
    scale = torch.where(finite, largest / 127.0, torch.nan)
    inverse = torch.full_like(largest, 127.0) / largest
    inverse = torch.where(finite & (largest > 1e-30), inverse, 0.0)
    numbers = (x * inverse).round_().nan_to_num_(nan=0.0).to(torch.int8)
    return torch.cat([numbers, scale.view(torch.int8)], dim=-1)


def from_int8_entries(entries: torch.Tensor) -> torch.Tensor:
    """[..., head_dim + 4] int8 -> [..., head_dim] float32."""
    numbers, scale = entries[..., :-INT8_SCALE_BYTES], entries[..., -INT8_SCALE_BYTES:]
    scale = scale.clone(memory_format=torch.contiguous_format)  # a contiguous copy, for alignment
    return numbers.float() * scale.view(torch.float32)


def paged_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    cache: torch.Tensor,  # [num_blocks, 2, block_size, num_kv_heads, entry]
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [num_heads]
    kv_scales: tuple[float, float] = UNSCALED,  # of an fp8 cache
    chunk: int | None = None,
) -> torch.Tensor:
    """Causal attention of each token to its request's cache: [num_tokens, num_heads, head_dim].

    `window` limits attention to the last `window` tokens, including the token itself. `chunk`
    limits it to tokens since the last multiple of `chunk`. `softcap` bounds scores to softcap *
    tanh(score / softcap). `sinks` are scores that each head adds to the softmax without a value.
    Decodes are computed together, longer queries one request at a time.
    """
    output = torch.empty_like(query)
    block_size = cache.shape[2]
    plain = softcap is None and sinks is None
    decodes = metadata.num_decodes if plain else 0
    if decodes:
        output[:decodes] = _decode(
            query[:decodes], cache, metadata, scale, window, chunk, kv_scales
        )
    starts = metadata.query_starts.tolist()
    seq_lens = metadata.seq_lens.tolist()
    for index in range(decodes, len(seq_lens)):
        rows = slice(starts[index], starts[index + 1])
        # Blocks entirely before the window or the chunk may belong to another request by now.
        length, past = seq_lens[index], seq_lens[index] - (rows.stop - rows.start)
        first = _first_seen(past, window, chunk)
        gathered = first // block_size * block_size  # first token of the gathered blocks
        table = metadata.block_table[index : index + 1, : -(-length // block_size)]
        key, value = _gather(cache, table[:, first // block_size :], kv_scales)
        seen = slice(first - gathered, length - gathered)
        own = query[rows], key[0, seen], value[0, seen], scale
        if plain and past == first == _first_seen(length - 1, window, chunk):
            output[rows] = _attend(*own)  # only the causal mask is needed
            continue
        mask = _seen(past, length, first, window, chunk, query.device)
        output[rows] = _attend(*own, mask) if plain else _attend_in_full(*own, mask, softcap, sinks)
    return output


def span_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    cache: torch.Tensor,  # with the step's keys and values
    metadata: AttentionMetadata,
    spans: Sequence[SpanRows],
    output: torch.Tensor,  # [num_tokens, num_heads, head_dim]: changed in the rows of spans
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    kv_scales: tuple[float, float] = UNSCALED,
) -> None:
    """Like `paged_attention` for rows that also see the tokens after them, up to a span's end.

    `window` limits only how far back they see, if `SpanRows.in_window`.
    """
    block_size = cache.shape[2]
    for span in spans:
        reach = window if span.in_window else None
        first = _first_seen(span.first, reach, None)
        gathered = first // block_size * block_size
        blocks = slice(first // block_size, -(-span.end // block_size))
        table = metadata.block_table[span.request : span.request + 1, blocks]
        key, value = _gather(cache, table, kv_scales)
        seen = slice(first - gathered, span.end - gathered)
        num_rows = span.rows.stop - span.rows.start
        positions = torch.arange(span.first, span.first + num_rows, device=query.device)[:, None]
        mask = torch.arange(first, span.end, device=query.device).expand(num_rows, -1)
        mask = mask >= 0 if reach is None else mask > positions - reach
        own = query[span.rows], key[0, seen], value[0, seen], scale, mask
        output[span.rows] = (
            _attend(*own) if softcap is None else _attend_in_full(*own, softcap, None)
        )


def varlen_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor,
    query_starts: torch.Tensor,  # [num_requests + 1]
    scale: float,
    reach: int | None = None,
) -> torch.Tensor:
    """Bidirectional attention inside each request, without a cache.

    With `reach`, a token sees only tokens at most `reach` positions away.
    """
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    starts = query_starts.tolist()
    for start, end in itertools.pairwise(starts):
        rows, mask = slice(start, end), None
        if reach is not None and reach < end - start - 1:
            tokens = torch.arange(end - start, device=query.device)
            mask = (tokens - tokens[:, None]).abs() <= reach
        output[rows] = _attend(query[rows], key[rows], value[rows], scale, mask, causal=False)
    return output


def _gather(
    cache: torch.Tensor, table: torch.Tensor, kv_scales: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather the keys and values of the blocks in table [n, blocks].

    Both are [n, tokens, kv_heads, head_dim].
    """
    if cache.dtype == FP8:
        pages = cache.view(torch.uint8)[table].view(FP8).float()
        for index, scale in enumerate(kv_scales):
            pages[:, :, index] *= scale
    else:
        pages = cache[table]  # [n, blocks, 2, block_size, kv_heads, entry]
    if pages.dtype == torch.int8:
        pages = from_int8_entries(pages)
    shape = (table.shape[0], -1, *pages.shape[4:])
    return pages[:, :, 0].reshape(shape), pages[:, :, 1].reshape(shape)


def _decode(
    query: torch.Tensor,
    cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    chunk: int | None,
    kv_scales: tuple[float, float],
) -> torch.Tensor:
    n, num_heads, head_dim = query.shape
    num_kv_heads = cache.shape[3]
    seq_lens = metadata.seq_lens[:n]
    num_blocks = -(-int(seq_lens.max()) // cache.shape[2])
    key, value = _gather(cache, metadata.block_table[:n, :num_blocks], kv_scales)
    position = torch.arange(key.shape[1], device=query.device)
    mask = position < seq_lens[:, None]
    if window is not None:
        mask &= position >= seq_lens[:, None] - window
    if chunk is not None:
        mask &= position >= (seq_lens[:, None] - 1) // chunk * chunk
    # Slots behind a request's last token hold stale data of other requests, and so may slots before
    # its window or chunk. A weight of zero does not exclude them: zero times infinity is NaN.
    unseen = ~mask[:, :, None, None]
    key.masked_fill_(unseen, 0.0)
    value.masked_fill_(unseen, 0.0)
    # Query heads that share a key head take the place of query rows.
    grouped = query.view(n, num_kv_heads, num_heads // num_kv_heads, head_dim)
    output = F.scaled_dot_product_attention(
        grouped,
        key.to(query.dtype).transpose(1, 2),
        value.to(query.dtype).transpose(1, 2),
        attn_mask=mask[:, None, None, :],
        scale=scale,
    )
    return output.reshape(n, num_heads, head_dim)


def _first_seen(position: int, window: int | None, chunk: int | None) -> int:
    """The first token that the token at `position` sees."""
    first = 0 if window is None else max(position + 1 - window, 0)
    return first if chunk is None else max(first, position // chunk * chunk)


def _seen(
    past: int, length: int, first: int, window: int | None, chunk: int | None, device: torch.device
) -> torch.Tensor:
    """Whether each token in past..length sees each token in first..length: [q, k] bool."""
    tokens = torch.arange(first, length, device=device)
    own = tokens[past - first :, None]
    seen = tokens <= own
    if window is not None:
        seen &= tokens > own - window
    if chunk is not None:
        seen &= tokens >= own // chunk * chunk
    return seen


def _attend(
    query: torch.Tensor,  # [q, num_heads, head_dim], of the last q tokens
    key: torch.Tensor,  # [k, num_kv_heads, head_dim]
    value: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,  # [q, k]
    causal: bool = True,  # without a mask, q and k are the same tokens
) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    output = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.to(query.dtype).transpose(0, 1).repeat_interleave(groups, dim=0)[None],
        value.to(query.dtype).transpose(0, 1).repeat_interleave(groups, dim=0)[None],
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=scale,
    )
    return output[0].transpose(0, 1)


def _attend_in_full(
    query: torch.Tensor,  # [q, num_heads, head_dim], of the last q tokens
    key: torch.Tensor,  # [k, num_kv_heads, head_dim]
    value: torch.Tensor,
    scale: float,
    mask: torch.Tensor,  # [q, k]
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Like `_attend`, with the full score matrix in float32."""
    groups = query.shape[1] // key.shape[1]
    key = key.float().repeat_interleave(groups, dim=1)
    value = value.float().repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(-1, len(query), 1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)
