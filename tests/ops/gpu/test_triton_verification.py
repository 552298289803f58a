"""Verification of drafts in one kernel, against the reference."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from penstock.ops import verification as reference
from penstock.ops.verification import FIRST_TOKEN, NUM_NEW, SampleRows

pytest.importorskip("triton", reason="needs Triton")

from penstock.ops.triton import verification as fused

MAX_SEQS, LENGTH, WIDTH = 12, 40, 6
Tables = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def new_tables(generator: torch.Generator) -> Tables:
    token_table = torch.randint(0, 9, (MAX_SEQS, LENGTH + WIDTH), generator=generator)
    num_tokens = torch.randint(1, LENGTH, (MAX_SEQS,), generator=generator)
    num_computed = torch.randint(8, LENGTH, (MAX_SEQS,), generator=generator)
    return token_table.int(), num_tokens.int(), num_computed.int()


def copies(tables: Tables, device: torch.device) -> Tables:
    token_table, num_tokens, num_computed = (table.clone().to(device) for table in tables)
    return token_table, num_tokens, num_computed


def known_tokens(tables: Tables) -> list[list[int]]:
    token_table, num_tokens, _ = tables
    return [
        row[:count] for row, count in zip(token_table.tolist(), num_tokens.tolist(), strict=True)
    ]


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("seed", range(4))
def test_the_kernel_keeps_what_the_reference_keeps(
    device: torch.device, seed: int, padding: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, WIDTH + 1, (7,), generator=generator).tolist()
    counts[0], counts[1] = WIDTH, 1
    num_samples = sum(counts)
    starts = list(accumulate(counts, initial=0))
    # Samples follow rows somewhere in the step, behind those of prompts.
    rows = torch.arange(num_samples) + 4
    step_tokens = torch.randint(0, 2, (num_samples + 9,), generator=generator).int()
    sampled = torch.randint(0, 2, (num_samples,), generator=generator)
    # Of the first request every draft holds, of the third none.
    sampled[: WIDTH - 1] = step_tokens[rows[1:WIDTH]]
    sampled[starts[2]] = 5
    faulted = torch.rand(num_samples, generator=generator) < 0.2
    slots = torch.randperm(MAX_SEQS, generator=generator)[:7].repeat_interleave(
        torch.tensor(counts)
    )
    tables = new_tables(generator)
    theirs = copies(tables, torch.device("cpu"))
    expected = reference.verify_drafts(
        SampleRows(step_tokens, rows, slots, torch.tensor(starts)),
        sampled, faulted, *theirs, WIDTH,
    )  # fmt: skip
    assert expected.results[0, NUM_NEW] == WIDTH
    assert expected.results[2, NUM_NEW] == 1

    def padded(values: torch.Tensor, filler: int) -> torch.Tensor:
        rest = torch.full((padding,), filler, dtype=values.dtype)
        return torch.cat([values, rest]).to(device)

    ours = copies(tables, device)
    got = fused.verify_drafts(
        SampleRows(
            step_tokens.to(device),
            padded(rows.int(), -1),
            padded(slots, -1),
            padded(torch.tensor(starts).int(), num_samples),
        ),
        padded(sampled, 1), padded(faulted.int(), 1).bool(), *ours, WIDTH,
    )  # fmt: skip
    assert got.slots.tolist() == expected.slots.tolist() + [-1] * padding
    assert got.num_accepted.tolist() == expected.num_accepted.tolist() + [0] * padding
    assert got.last_rows.tolist()[:7] == expected.last_rows.tolist()
    for own, wanted in zip(got.results.tolist(), expected.results.tolist(), strict=False):
        assert own[: FIRST_TOKEN + own[NUM_NEW]] == wanted[: FIRST_TOKEN + wanted[NUM_NEW]]
    assert got.results[7:, NUM_NEW].tolist() == [0] * padding
    assert known_tokens(ours) == known_tokens(theirs)
    assert ours[2].tolist() == theirs[2].tolist()


def test_drafts_are_written_behind_the_known_tokens(device: torch.device) -> None:
    tables = new_tables(torch.Generator().manual_seed(0))
    ours = copies(tables, device)
    slots = torch.tensor([4, 7, -1, 2], device=device)
    drafts = torch.arange(20, device=device).view(5, 4).T[:, :3]
    fused.write_drafts(slots, drafts, ours[0], ours[1])
    expected = tables[0].clone()
    for row, slot in enumerate(slots.tolist()):
        count = int(tables[1][slot])
        if slot >= 0:
            expected[slot, count : count + 3] = drafts[row].cpu()
    assert torch.equal(ours[0].cpu(), expected)
    assert torch.equal(ours[1].cpu(), tables[1])
