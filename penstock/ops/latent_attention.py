"""Latent attention (MLA): keys and values of all heads derive from one short vector per token.

A layer's cache is ``[num_blocks, block_size, entry]``. A token's entry is its latent vector
[rank], then the rotated part of its key [rope_dim], which all heads share. In an int8 cache, the
four bytes of a scale follow. `up` [heads, nope_dim + value_dim, rank] maps a latent vector to each
head's key without positions and to its value. There are two ways to compute the same result:

- *expanded*: compute the keys and values of all cached tokens, then use ordinary attention;
- *absorbed*: multiply queries by the keys' part of `up`, attend to the latent vectors themselves,
  and multiply the result by the values' part. Cached tokens need no computation, but the dot
  products are longer. This suits queries of few tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from penstock.ops.attention import AttentionMetadata, from_int8_entries, to_int8_entries


def write_latent(entries: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Store a step's entries [n, rank + rope_dim] at their slots in the cache."""
    block_size = cache.shape[1]
    stored = to_int8_entries(entries) if cache.dtype == torch.int8 else entries.to(cache.dtype)
    cache[slot_mapping // block_size, slot_mapping % block_size] = stored


def latent_attention(
    nope: torch.Tensor,  # [num_tokens, heads, nope_dim]: the part without positions
    rope: torch.Tensor,  # [num_tokens, heads, rope_dim]: the rotated part
    cache: torch.Tensor,  # [num_blocks, block_size, entry]
    metadata: AttentionMetadata,
    up: torch.Tensor,  # [heads, nope_dim + value_dim, rank]
    scale: float,
    entries: torch.Tensor | None = None,  # [num_tokens, rank + rope_dim]: of this step
) -> torch.Tensor:
    """Causal attention of each token to its request's cache: [num_tokens, heads, value_dim].

    The step's entries are already in the cache. Implementations may read them from `entries`
    instead, where they are contiguous. Decodes are computed together, longer queries one request at
    a time.
    """
    num_tokens, num_heads, nope_dim = nope.shape
    output = nope.new_empty(num_tokens, num_heads, up.shape[1] - nope_dim)
    decodes = metadata.num_decodes
    if decodes:
        output[:decodes] = _decode(nope[:decodes], rope[:decodes], cache, metadata, up, scale)
    starts, seq_lens = metadata.query_starts.tolist(), metadata.seq_lens.tolist()
    for index in range(decodes, len(seq_lens)):
        rows, seq_len = slice(starts[index], starts[index + 1]), seq_lens[index]
        num_blocks = -(-seq_len // cache.shape[1])
        cached = _gather(cache, metadata.block_table[index : index + 1, :num_blocks])
        attend = _expanded if is_worth_expanding(len(nope[rows]), up) else _absorbed
        output[rows] = attend(nope[rows], rope[rows], cached[0, :seq_len], up, scale)
    return output


def is_worth_expanding(query_len: int, up: torch.Tensor) -> bool:
    """Whether the expanded form costs less than the longer products of the absorbed form."""
    _, both, rank = up.shape  # expanding a cached token's head: rank * both, once for all queries
    return query_len * (2 * rank - both) > rank * both


def absorb_keys(nope: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Map queries [n, heads, nope_dim] to the latent space: [n, heads, rank]."""
    n, heads, nope_dim = nope.shape
    absorbed = nope.new_empty(n, heads, up.shape[2])
    torch.bmm(nope.transpose(0, 1), up[:, :nope_dim], out=absorbed.transpose(0, 1))
    return absorbed


def expand_values(latent: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> None:
    """Map weighted latent vectors [n, heads, rank] to values: `out` [n, heads, value_dim]."""
    values = up[:, up.shape[1] - out.shape[2] :]  # [heads, value_dim, rank]
    torch.bmm(latent.transpose(0, 1), values.transpose(1, 2), out=out.transpose(0, 1))


def _gather(cache: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Entries of the blocks in table [n, blocks]: [n, tokens, rank + rope_dim]."""
    pages = cache[table]
    if pages.dtype == torch.int8:
        pages = from_int8_entries(pages)
    return pages.flatten(1, 2)


def _decode(
    nope: torch.Tensor,  # one token per request
    rope: torch.Tensor,
    cache: torch.Tensor,
    metadata: AttentionMetadata,
    up: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    n, num_heads, nope_dim = nope.shape
    seq_lens = metadata.seq_lens[:n]
    num_blocks = -(-int(seq_lens.max()) // cache.shape[1])
    cached = _gather(cache, metadata.block_table[:n, :num_blocks])
    mask = torch.arange(cached.shape[1], device=nope.device) < seq_lens[:, None]
    # Slots behind a request's last token hold stale data of other requests. A weight of zero does
    # not exclude them: zero times infinity is NaN.
    cached = cached.masked_fill_(~mask[:, :, None], 0.0).to(nope.dtype)
    query = torch.cat([absorb_keys(nope, up), rope], dim=-1)
    # All heads share one key, so heads take the place of query rows. Values are as wide as keys,
    # because torch has a fast path only for that; the excess is dropped afterwards.
    summed = F.scaled_dot_product_attention(
        query[:, None],
        cached[:, None],
        cached[:, None],
        attn_mask=mask[:, None, None, :],
        scale=scale,
    )
    output = nope.new_empty(n, num_heads, up.shape[1] - nope_dim)
    expand_values(summed[:, 0, :, : up.shape[2]], up, output)
    return output


def _absorbed(
    nope: torch.Tensor,  # [q, heads, nope_dim], of the last q tokens
    rope: torch.Tensor,
    cached: torch.Tensor,  # [k, rank + rope_dim]
    up: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    q, num_heads, nope_dim = nope.shape
    query = torch.cat([absorb_keys(nope, up), rope], dim=-1)
    shared = cached.to(nope.dtype).expand(num_heads, -1, -1)  # [heads, k, rank + rope_dim]
    summed = _attend(query.transpose(0, 1), shared, shared, scale)
    output = nope.new_empty(q, num_heads, up.shape[1] - nope_dim)
    expand_values(summed.transpose(0, 1)[..., : up.shape[2]], up, output)
    return output


def _expanded(
    nope: torch.Tensor,  # [q, heads, nope_dim], of the last q tokens
    rope: torch.Tensor,
    cached: torch.Tensor,  # [k, rank + rope_dim]
    up: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    (_, num_heads, nope_dim), rank = nope.shape, up.shape[2]
    cached = cached.to(nope.dtype)
    both = F.linear(cached[:, :rank], up.flatten(0, 1)).view(-1, *up.shape[:2])
    key_rope = cached[:, None, rank:].expand(-1, num_heads, -1)
    key = torch.cat([both[..., :nope_dim], key_rope], dim=-1)  # [k, heads, nope_dim + rope_dim]
    value = both[..., nope_dim:]
    missing = key.shape[2] - value.shape[2]
    output = _attend(
        torch.cat([nope, rope], dim=-1).transpose(0, 1),
        key.transpose(0, 1),
        (F.pad(value, (0, missing)) if missing > 0 else value).transpose(0, 1),
        scale,
    )
    return output.transpose(0, 1)[..., : value.shape[2]]


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """All are [heads, tokens, dim]. The queries belong to the last tokens."""
    tokens = torch.arange(key.shape[1], device=query.device)
    seen = tokens <= tokens[key.shape[1] - query.shape[1] :, None]  # [q, k]
    output = F.scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=seen, scale=scale
    )
    return output[0]
