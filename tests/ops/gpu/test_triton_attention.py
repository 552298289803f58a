"""Triton's paged attention against attention over each request's own tokens in float64."""

from __future__ import annotations

import pytest
import torch
from step_metadata import metadata_of

from penstock.ops import reference

pytest.importorskip("triton", reason="needs Triton")

from penstock.ops.triton.attention import paged_attention


def expected_rows(
    query: torch.Tensor,  # [q, heads, dim], the last q tokens
    key: torch.Tensor,  # [k, kv_heads, dim]
    value: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    chunk: int | None,
) -> torch.Tensor:
    group = query.shape[1] // key.shape[1]
    key = key.double().repeat_interleave(group, 1)
    value = value.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    tokens = torch.arange(len(key))
    own = tokens[len(key) - len(query) :, None]
    seen = tokens <= own
    if window is not None:
        seen &= own - tokens < window
    if chunk is not None:
        seen &= tokens // chunk == own // chunk
    scores = scores.masked_fill(~seen.to(scores.device), float("-inf"))
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, len(query), 1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def check(
    device: torch.device,
    query_lens: list[int],
    seq_lens: list[int],
    heads: tuple[int, int],
    dim: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    softcap: float | None = None,
    with_sinks: bool = False,
    any_order: bool = False,
    padding: int = 0,
    num_prompts: int = 0,
    chunk: int | None = None,
    decode_rows: int = 1,
) -> None:
    num_heads, kv_heads = heads
    scale = dim**-0.5
    num_blocks = [-(-length // block_size) for length in seq_lens]
    # Every page is poisoned: what a request did not write must not matter.
    cache = torch.full(
        (sum(num_blocks) + 1, 2, block_size, kv_heads, dim), float("nan"), dtype=dtype
    )
    order = torch.randperm(sum(num_blocks)) + 1
    table = torch.zeros(len(seq_lens) + padding, max(num_blocks), dtype=torch.int32)
    queries, keys, values, expected = [], [], [], []
    sinks = torch.randn(num_heads) if with_sinks else None
    for index, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        blocks = order[sum(num_blocks[:index]) :][: num_blocks[index]]
        table[index, : len(blocks)] = blocks
        key, value = torch.randn(2, seq_len, kv_heads, dim).to(dtype)
        for position in range(seq_len):
            page = cache[blocks[position // block_size]]
            page[0, position % block_size] = key[position]
            page[1, position % block_size] = value[position]
        query = torch.randn(query_len, num_heads, dim).to(dtype)
        queries.append(query)
        keys.append(key[-query_len:])
        values.append(value[-query_len:])
        expected.append(expected_rows(query, key, value, scale, window, softcap, sinks, chunk))
        # Blocks behind a window or before a chunk are given back while a request runs.
        past = seq_len - query_len
        if window is not None:
            table[index, : max(past + 1 - window, 0) // block_size] = 0
        if chunk is not None:
            table[index, : past // chunk * chunk // block_size] = 0
    decodes = sum(length == 1 for length in query_lens)
    metadata = metadata_of(
        query_lens, seq_lens, table, device, any_order, padding, num_prompts, decode_rows
    )
    rows = torch.cat([*queries, torch.zeros(padding, num_heads, dim, dtype=dtype)])
    own = {}
    if num_prompts:
        # As the projection leaves them: side by side. Their pages must not be needed.
        qkv = torch.cat([rows, torch.cat(keys), torch.cat(values)], dim=1).to(device)
        own["key"], own["value"] = qkv.split([num_heads, kv_heads, kv_heads], dim=1)[1:]
        for blocks in table[decodes : decodes + num_prompts]:
            cache[blocks[blocks > 0]] = float("nan")
    got = paged_attention(
        rows.to(device), cache.to(device), metadata, scale, window, softcap,
        None if sinks is None else sinks.to(device), chunk=chunk, **own,
    )  # fmt: skip
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    wanted = torch.cat(expected).to(dtype)
    if not any_order and not num_prompts and decode_rows == 1:  # the reference is right as well
        plain = reference.paged_attention(
            rows.to(device), cache.to(device), metadata, scale, window, softcap,
            None if sinks is None else sinks.to(device), chunk=chunk,
        )  # fmt: skip
        torch.testing.assert_close(plain.cpu(), wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got[: len(wanted)].cpu(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("heads", "dim", "window"),
    [
        ((4, 2), 32, None),
        ((4, 2), 32, 5),
        ((4, 2), 32, 64),
        ((3, 1), 24, 5),
        ((3, 1), 24, None),
        ((2, 2), 128, 64),
    ],
)
def test_any_mix_of_prompts_chunks_and_decodes(
    device: torch.device, heads: tuple[int, int], dim: int, window: int | None
) -> None:
    torch.manual_seed(0)
    check(device, [1, 1, 1, 7, 40, 3], [1, 18, 100, 7, 61, 40], heads, dim, 16, window=window)


@pytest.mark.parametrize("chunk", [16, pytest.param(24, marks=pytest.mark.slow), 37, 100, 200])
def test_tokens_see_their_own_chunk_alone(device: torch.device, chunk: int) -> None:
    torch.manual_seed(0)
    lens = [1, 1, 1, 1, 7, 40, 3], [1, 18, 100, 101, 7, 61, 40]
    check(device, *lens, (4, 2), 32, 16, chunk=chunk)
    check(device, *lens, (3, 1), 24, 64, chunk=chunk, with_sinks=True, any_order=True, padding=2)


@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_block_sizes(device: torch.device, block_size: int) -> None:
    torch.manual_seed(1)
    check(device, [1, 50], [70, 90], (4, 2), 32, block_size)


@pytest.mark.parametrize("settings", [{"softcap": 2.0}, {"with_sinks": True}])
def test_soft_cap_and_sinks(device: torch.device, settings: dict[str, object]) -> None:
    torch.manual_seed(2)
    check(device, [1, 1, 20], [3, 90, 45], (4, 2), 32, 16, **settings)  # type: ignore[arg-type]
    check(device, [1, 20], [90, 45], (4, 2), 32, 16, window=8, **settings)  # type: ignore[arg-type]


def test_half_precision(device: torch.device) -> None:
    torch.manual_seed(3)
    check(device, [1, 1, 33], [5, 140, 70], (8, 2), 64, 16, dtype=torch.float16)


def test_single_tokens_in_any_order_with_padding_behind_them(device: torch.device) -> None:
    """As a captured step has them: how many requests decode is not known to the host."""
    torch.manual_seed(4)
    check(device, [1, 9, 1, 30, 1], [40, 9, 70, 64, 1], (4, 2), 32, 16, any_order=True, padding=3)


def test_many_requests_of_which_only_the_longest_are_split(device: torch.device) -> None:
    torch.manual_seed(5)
    lens = [1 + (7 * index) % 40 for index in range(32)]
    lens[10], lens[25] = 1300, 600
    check(device, [1] * 32, lens, (2, 2), 16, 16)


@pytest.mark.parametrize(("heads", "dim"), [((4, 2), 32), ((3, 1), 16), ((2, 2), 64)])
def test_prompts_from_their_first_token_need_no_page(
    device: torch.device, heads: tuple[int, int], dim: int
) -> None:
    torch.manual_seed(6)
    check(
        device, [1, 1, 70, 3, 33, 20, 2], [1, 18, 70, 3, 33, 61, 40], heads, dim, 16, num_prompts=3
    )
    check(device, [100, 40], [100, 40], heads, dim, 16, num_prompts=2)


@pytest.mark.parametrize(
    "settings", [{"window": 9}, {"chunk": 9}, {"softcap": 2.0}, {"with_sinks": True}]
)
def test_prompts_take_the_way_through_the_pages_where_the_fast_one_lacks_something(
    device: torch.device, settings: dict[str, object]
) -> None:
    torch.manual_seed(7)
    with pytest.raises(AssertionError):  # its pages are poisoned
        check(device, [1, 40], [18, 40], (4, 2), 32, 16, num_prompts=1, **settings)  # type: ignore[arg-type]


VERIFIED = [5, 1, 3, 5, 2, 4], [5, 40, 300, 700, 33, 67]


@pytest.mark.parametrize(
    ("heads", "dim", "decode_rows"),
    [((4, 2), 32, 8), ((3, 1), 24, 8), ((2, 2), 16, 16), ((20, 1), 16, 8)],
)
def test_decodes_with_drafts_are_one_tile_of_queries(
    device: torch.device, heads: tuple[int, int], dim: int, decode_rows: int
) -> None:
    """The last one has more rows than a tile, and its drafts are longer queries."""
    check(device, *VERIFIED, heads, dim, 16, decode_rows=decode_rows, padding=2)


@pytest.mark.parametrize(
    "settings",
    [{"window": 9}, {"chunk": 37}, {"with_sinks": True, "window": 40},
     *(pytest.param(own, marks=pytest.mark.slow)
       for own in ({"window": 65}, {"chunk": 64}, {"softcap": 2.0}, {"with_sinks": True},
                   {"dtype": torch.float16}))],
)  # fmt: skip
def test_drafts_see_what_single_tokens_see(
    device: torch.device, settings: dict[str, object]
) -> None:
    check(device, *VERIFIED, (4, 2), 32, 16, decode_rows=8, padding=1, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("heads", [(4, 2), (20, 1)])
def test_drafts_are_split_beside_prompts_in_any_order(
    device: torch.device, heads: tuple[int, int]
) -> None:
    lens = [4, 9, 1, 30, 5], [300, 9, 70, 64, 140]
    check(device, *lens, heads, 16, 16, any_order=True, padding=3, decode_rows=8)


def test_drafts_behind_a_split_do_not_reach_the_tokens_before_it(device: torch.device) -> None:
    """The last split holds drafts alone, of which earlier tokens see none."""
    lens = [257, 258, 260, 385, 386, 513]
    check(device, [4] * 6, lens, (4, 2), 32, 16, decode_rows=4)
