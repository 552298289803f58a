"""Random batches for latent attention, and what it must give, token by token in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from step_metadata import metadata_of

from penstock.ops.attention import AttentionMetadata, to_int8_entries


@dataclass(frozen=True)
class Sizes:
    heads: int
    nope: int
    rope: int
    value: int
    rank: int


@dataclass
class LatentBatch:
    nope: torch.Tensor
    rope: torch.Tensor
    cache: torch.Tensor
    metadata: AttentionMetadata
    up: torch.Tensor
    scale: float
    entries: torch.Tensor
    expected: torch.Tensor  # [tokens, heads, value], float64, without padding

    def arguments(self) -> tuple[object, ...]:
        return self.nope, self.rope, self.cache, self.metadata, self.up, self.scale, self.entries


def attend(
    nope: torch.Tensor, rope: torch.Tensor, cached: torch.Tensor, up: torch.Tensor, scale: float
) -> torch.Tensor:
    """One request: the queries are the last tokens of `cached` [k, rank + rope]."""
    rank = up.shape[2]
    latent, key_rope = cached[:, :rank].double(), cached[:, rank:].double()
    both = torch.einsum("kr,hdr->khd", latent, up.double())
    key, value = both[..., : nope.shape[2]], both[..., nope.shape[2] :]
    rows = []
    for index in range(len(nope)):
        end = len(cached) - len(nope) + index + 1
        scores = torch.einsum("hd,khd->hk", nope[index].double(), key[:end])
        scores += torch.einsum("hd,kd->hk", rope[index].double(), key_rope[:end])
        rows.append(torch.einsum("hk,khd->hd", (scores * scale).softmax(-1), value[:end]))
    return torch.stack(rows)


def make_batch(
    query_lens: list[int],
    seq_lens: list[int],
    sizes: Sizes,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    any_order: bool = False,
    padding: int = 0,  # requests without a token, behind the others
    num_prompts: int = 0,
    cache_dtype: torch.dtype | None = None,
    decode_rows: int = 1,
) -> LatentBatch:
    """Every page is poisoned: what a request did not write must not matter."""
    entry, scale = sizes.rank + sizes.rope, 0.7 * (sizes.nope + sizes.rope) ** -0.5
    num_blocks = [-(-length // block_size) for length in seq_lens]
    shape = (sum(num_blocks) + 1, block_size, entry)
    cache = torch.full(shape, torch.nan)
    cache = to_int8_entries(cache) if cache_dtype == torch.int8 else cache.to(cache_dtype or dtype)
    order = torch.randperm(sum(num_blocks)) + 1
    table = torch.zeros(len(seq_lens) + padding, max(num_blocks), dtype=torch.int32)
    up = torch.randn(sizes.heads, sizes.nope + sizes.value, sizes.rank) * sizes.rank**-0.5
    up = up.to(dtype)
    nope, rope, entries, expected = [], [], [], []
    for index, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        blocks = order[sum(num_blocks[:index]) :][: num_blocks[index]]
        table[index, : len(blocks)] = blocks
        cached = torch.randn(seq_len, entry).to(dtype)
        stored = to_int8_entries(cached) if cache_dtype == torch.int8 else cached.to(cache.dtype)
        positions = torch.arange(seq_len)
        cache[blocks[positions // block_size], positions % block_size] = stored
        nope.append(torch.randn(query_len, sizes.heads, sizes.nope).to(dtype))
        rope.append(torch.randn(query_len, sizes.heads, sizes.rope).to(dtype))
        entries.append(cached[-query_len:])
        expected.append(attend(nope[-1], rope[-1], cached, up, scale))
    decodes = sum(length == 1 for length in query_lens)
    if num_prompts:  # their pages must not be needed
        for blocks in table[decodes : decodes + num_prompts]:
            cache[blocks[blocks > 0].long()] = torch.nan
    metadata = metadata_of(
        query_lens, seq_lens, table, device, any_order, padding, num_prompts, decode_rows
    )
    rows = [torch.zeros(padding, sizes.heads, sizes.nope + sizes.rope, dtype=dtype)]
    # As the projections leave them: parts of a query side by side.
    query = torch.cat([torch.cat([torch.cat(nope), torch.cat(rope)], dim=-1), *rows]).to(device)
    return LatentBatch(
        nope=query[..., : sizes.nope],
        rope=query[..., sizes.nope :],
        cache=cache.to(device),
        metadata=metadata,
        up=up.to(device),
        scale=scale,
        entries=torch.cat([*entries, torch.zeros(padding, entry, dtype=dtype)]).to(device),
        expected=torch.cat(expected),
    )
