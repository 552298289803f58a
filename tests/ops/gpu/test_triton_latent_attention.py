"""Triton's latent attention against attention to expanded keys in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from latent_batch import Sizes, make_batch

from penstock.ops import reference

pytest.importorskip("triton", reason="needs Triton")

from penstock.ops.triton import latent_attention as fused
from penstock.ops.triton.latent_rotary import norm_rotate_latent

SMALL = Sizes(heads=4, nope=16, rope=8, value=12, rank=24)
ODD = Sizes(heads=20, nope=12, rope=16, value=24, rank=40)
TOLERANCES = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def check(
    device: torch.device, query_lens: list[int], seq_lens: list[int], sizes: Sizes,
    block_size: int = 16, dtype: torch.dtype = torch.float32, **options: Any,
) -> None:  # fmt: skip
    batch = make_batch(query_lens, seq_lens, sizes, block_size, dtype, device, **options)
    output = fused.latent_attention(*batch.arguments())  # type: ignore[arg-type]
    tolerance = TOLERANCES[dtype]
    got = output[: len(batch.expected)].double().cpu()
    torch.testing.assert_close(got, batch.expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("sizes", [SMALL, ODD], ids=["small", "odd"])
def test_any_mix_of_prompts_chunks_and_decodes(device: torch.device, sizes: Sizes) -> None:
    torch.manual_seed(0)
    check(device, [1, 1, 1, 7, 9, 3], [1, 18, 40, 7, 37, 20], sizes, 16)


@pytest.mark.parametrize("block_size", [1, 48, 256])
def test_block_sizes(device: torch.device, block_size: int) -> None:
    torch.manual_seed(1)
    check(device, [1, 9], [50, 60], SMALL, block_size)


def test_more_heads_than_a_program_takes(device: torch.device) -> None:
    torch.manual_seed(2)
    check(device, [1, 3], [20, 18], Sizes(70, 8, 8, 8, 16))
    check(device, [1, 3], [20, 18], Sizes(70, 8, 8, 8, 16), dtype=torch.float16)


def test_half_precision(device: torch.device) -> None:
    torch.manual_seed(3)
    check(device, [1, 1, 33], [5, 140, 70], SMALL, dtype=torch.float16)
    check(device, [1, 33, 2], [5, 33, 70], SMALL, dtype=torch.float16, num_prompts=1)


def test_single_tokens_in_any_order_with_padding_behind_them(device: torch.device) -> None:
    """As a captured step has them: how many requests decode is not known to the host."""
    torch.manual_seed(4)
    lens = [1, 9, 1, 20, 1], [40, 9, 50, 34, 1]
    check(device, *lens, SMALL, any_order=True, padding=3)


def test_a_long_cache_in_parts_beside_short_ones(device: torch.device) -> None:
    torch.manual_seed(5)
    check(device, [1, 1, 1], [300, 3, 70], SMALL)


@pytest.mark.parametrize("sizes", [SMALL, ODD], ids=["small", "odd"])
def test_decodes_with_drafts_are_split_as_single_tokens_are(
    device: torch.device, sizes: Sizes
) -> None:
    lens = [3, 1, 4, 2, 4], [130, 40, 4, 65, 66]
    check(device, *lens, sizes, decode_rows=4, padding=2)
    check(device, *lens, sizes, decode_rows=4, dtype=torch.float16)
    lens = [3, 9, 1, 20, 4], [80, 9, 50, 34, 4]
    check(device, *lens, sizes, any_order=True, padding=2, decode_rows=4)


@pytest.mark.parametrize("sizes", [SMALL, ODD], ids=["small", "odd"])
def test_prompts_from_their_first_token_need_no_page(device: torch.device, sizes: Sizes) -> None:
    torch.manual_seed(6)
    check(device, [1, 37, 3, 7, 2], [18, 37, 3, 22, 19], sizes, num_prompts=2)


def test_prompts_alone_need_no_page(device: torch.device) -> None:
    torch.manual_seed(6)
    check(device, [40, 33], [40, 33], SMALL, num_prompts=2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="large: needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [16, 128])
def test_published_sizes(device: torch.device, dtype: torch.dtype, heads: int) -> None:
    torch.manual_seed(7)
    sizes = Sizes(heads, 128, 64, 128, 512)
    lens = [1, 1, 200, 90, 2], [1, 700, 200, 350, 40]
    check(device, *lens, sizes, 64, dtype)
    check(device, *lens, sizes, 64, dtype, num_prompts=1)
    check(device, *lens, sizes, 64, dtype, any_order=True, padding=2)
    check(device, [5, 1, 3, 5], [5, 700, 65, 350], sizes, 64, dtype, decode_rows=8, padding=2)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("heads", "rank", "rope_dim"), [(4, 24, 8), (20, 40, 12)])
def test_entries_and_rotated_queries_are_those_of_the_single_ops(
    device: torch.device, interleaved: bool, heads: int, rank: int, rope_dim: int
) -> None:
    torch.manual_seed(8)
    n, nope_dim, block_size = 5, 10, 4
    query = torch.randn(n, heads, nope_dim + rope_dim, device=device)
    both = torch.randn(n, 7 + rank + rope_dim, device=device)
    compressed = both[:, 7:]  # behind the compressed query
    weight = torch.randn(rank, device=device)
    cos, sin = torch.randn(2, n, 1, rope_dim // 2, device=device)
    slots = torch.tensor([3, 4, 11, 0, 7], device=device)
    cache = torch.zeros(3, block_size, rank + rope_dim, device=device)
    rope, entries = norm_rotate_latent(
        query, compressed, weight, 1e-6, cos, sin, interleaved, cache, slots
    )
    expected_rope, key = query[..., nope_dim:], compressed[:, None, rank:]
    if interleaved:
        expected_rope = torch.cat([expected_rope[..., 0::2], expected_rope[..., 1::2]], dim=-1)
        key = torch.cat([key[..., 0::2], key[..., 1::2]], dim=-1)
    expected_rope, key = reference.rotate_pair(expected_rope, key, cos, sin)
    latent = reference.rms_norm(compressed[:, :rank], weight, 1e-6)
    expected = torch.cat([latent, key[:, 0]], dim=-1)
    torch.testing.assert_close(rope, expected_rope)
    torch.testing.assert_close(entries, expected)
    wanted = torch.zeros_like(cache)
    reference.write_latent(entries, wanted, slots)
    assert torch.equal(cache, wanted)
