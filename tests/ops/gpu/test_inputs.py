"""A step's inputs from the tables, and the tables' own updates."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from penstock.ops.triton import inputs


def ints(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_rows_come_from_the_tables_and_padding_is_null(device: torch.device) -> None:
    torch.manual_seed(0)
    block_size, rows = 4, 12
    tokens = torch.randint(0, 99, (6, 40), dtype=torch.int32, device=device)
    blocks = torch.randint(1, 99, (6, 10), dtype=torch.int32, device=device)
    computed = ints([0, 5, 0, 9, 0, 0], device)
    poison = -7
    token_ids = torch.full((rows,), poison, dtype=torch.int32, device=device)
    positions, token_slots, mapping = torch.full((3, rows), poison, device=device)
    seq_lens = torch.full((4,), poison, dtype=torch.int32, device=device)
    table = torch.full((4, 10), poison, dtype=torch.int32, device=device)
    before = computed.clone()
    inputs.prepare_rows(
        ints([0, 1, 7, 7, 7], device), ints([3, 1, -1, -1], device), tokens, computed, blocks,
        block_size, token_ids, positions, token_slots, mapping, seq_lens, table,
        tokens=True, advance=True,
    )  # fmt: skip
    slots = [3, *[1] * 6]
    where = [9, *range(5, 11)]
    assert token_slots.tolist() == slots + [-1] * 5
    assert positions.tolist() == where + [0] * 5
    assert token_ids.tolist() == tokens[slots, where].tolist() + [0] * 5
    expected = [
        int(blocks[slot, at // block_size]) * block_size + at % block_size
        for slot, at in zip(slots, where, strict=True)
    ]
    assert mapping.tolist() == expected + [0] * 5
    assert seq_lens.tolist() == [10, 11, 0, 0]
    assert torch.equal(table[0, :3], blocks[3, :3])
    assert torch.equal(table[1, :3], blocks[1, :3])
    assert (computed - before).tolist() == [0, 6, 0, 1, 0, 0]
    out = torch.zeros(2, 3, dtype=torch.int64, device=device)
    inputs.sample_rows(ints([0, 6], device), token_slots, positions, out[0], out[1])
    assert out.tolist() == [[3, 1, 0], [10, 11, 0]]


def test_tokens_blocks_and_requests_enter_the_tables(device: torch.device) -> None:
    tokens = torch.zeros(4, 10, dtype=torch.int32, device=device)
    lengths, prompts, computed = torch.zeros(3, 4, dtype=torch.int32, device=device)
    packed = ints([2, 0, 3, 2, 1, 0, 3, 1, 1, 0, 7, 8, 9, 5], device)
    inputs.write_requests(packed, 2, tokens, lengths, prompts, computed)
    assert tokens[2, :4].tolist() == [7, 8, 9, 0]
    assert tokens[0, :2].tolist() == [5, 0]
    assert lengths.tolist() == [1, 0, 3, 0]
    assert prompts.tolist() == [1, 0, 2, 0]
    assert computed.tolist() == [0, 0, 1, 0]
    inputs.append_tokens(
        torch.tensor([2, 0]).to(device), torch.tensor([4, 6]).to(device), tokens, lengths
    )
    assert tokens[2, :4].tolist() == [7, 8, 9, 4]
    assert tokens[0, :2].tolist() == [5, 6]
    assert lengths.tolist() == [2, 0, 4, 0]
    table = torch.zeros(4, 5, dtype=torch.int32, device=device)
    inputs.write_blocks(
        torch.stack([ints([1, 3], device), ints([0, 4], device), ints([9, 8], device)]), table
    )
    assert table[1, 0] == 9
    assert table[3, 4] == 8
