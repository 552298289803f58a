"""Collectives over peer memory. One process plays all ranks."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from peer_players import Players

from penstock.ops.triton.peers import PIECE_BYTES, PeerMemory, max_bytes_of

MAX_BYTES = 64 * PIECE_BYTES
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize("size", [2, 3, 8])
def test_sums_are_in_rank_order_and_equal_on_all_ranks(size: int) -> None:
    """Calls of different types and sizes, one after the other, use the same buffers."""
    players, cases = Players(size, MAX_BYTES), []
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for num in (1, 1000, 4099, MAX_BYTES // 4):
            xs = [torch.zeros(num, dtype=dtype, device="cuda") for _ in range(size)]

            def total(rank: PeerMemory, xs: list[torch.Tensor] = xs) -> torch.Tensor:
                return rank.all_reduce(xs[rank.rank].clone())

            def stacked(rank: PeerMemory, xs: list[torch.Tensor] = xs) -> torch.Tensor:
                return rank.stack(xs[rank.rank])

            cases.append((xs, players.capture(total), players.capture(stacked)))
    for call in range(60):
        xs, (sums, totals), (stacks, stacked_parts) = cases[7 * call % len(cases)]
        for x in xs:
            x.copy_(torch.randn(len(x), device="cuda"))
        players.replay(sums)
        players.replay(stacks)
        expected = torch.zeros(len(xs[0]), device="cuda")
        for x in xs:
            expected += x.float()
        for found, parts in zip(totals, stacked_parts, strict=True):
            assert torch.equal(found, expected.to(found.dtype))
            assert torch.equal(parts, torch.stack(xs))


@needs_gpu
def test_graphs_of_an_odd_number_of_calls_are_replayed() -> None:
    """No call may overwrite what another rank still reads."""
    players = Players(2, MAX_BYTES)
    xs = [torch.zeros(3000, device="cuda") for _ in range(2)]

    def thrice(rank: PeerMemory) -> torch.Tensor:
        x = xs[rank.rank]
        for _ in range(3):
            rank.all_reduce(x.mul_(0.5).add_(rank.rank))
        return x

    graphs, _ = players.capture(thrice)
    for x in xs:
        x.zero_()
    players.replay(graphs, times=50)
    for x in xs:
        assert torch.equal(x, torch.full_like(x, 150.0))  # each call adds 1


def test_the_size_limit_falls_with_the_number_of_ranks() -> None:
    sizes = [max_bytes_of(size) for size in (2, 4, 8)]
    assert sizes == sorted(sizes, reverse=True)
    assert all(size % PIECE_BYTES == 0 for size in sizes)
