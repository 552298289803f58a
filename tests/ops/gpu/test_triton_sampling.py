"""Triton's choice of tokens against the reference's."""

from __future__ import annotations

import math

import pytest
import torch

from penstock.ops import sampling as reference

pytest.importorskip("triton", reason="needs Triton")

from penstock.ops.triton.sampling import GREEDY, choose_tokens

VOCAB = 9000  # more than two chunks


def tables(
    rows: int, temperature: float, min_p: float = 0.0, top_k: int = VOCAB, top_p: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    log_min_p = math.log(min_p) if min_p else -math.inf
    floats = torch.tensor([[temperature, log_min_p, top_p]] * rows)
    ints = torch.tensor([[top_k, 0, 0]] * rows)
    ints[:, 1] = torch.randint(-(2**63), 2**63 - 1, (rows,))
    return floats, ints


def test_greedy_rows_take_the_first_of_the_most_likely(device: torch.device) -> None:
    logits = torch.randn(3, VOCAB)
    logits[1, [100, 5000]] = 50.0
    floats, ints = tables(3, float(GREEDY.value))
    slots = torch.arange(3)
    tokens, faulted = choose_tokens(
        logits.to(device), slots.to(device), slots.to(device), floats.to(device), ints.to(device),
        draws=False, truncates=False,
    )  # fmt: skip
    assert tokens.tolist() == [int(logits[0].argmax()), 100, int(logits[2].argmax())]
    assert not faulted.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_without_usable_logits_are_faulted_alone(device: torch.device, bad: float) -> None:
    logits = torch.randn(3, VOCAB)
    logits[1, 6000] = bad
    floats, ints = tables(3, 0.7)
    slots = torch.arange(3)
    tokens, faulted = choose_tokens(
        logits.to(device), slots.to(device), slots.to(device), floats.to(device), ints.to(device),
        draws=True, truncates=False,
    )  # fmt: skip
    assert faulted.tolist() == [False, True, False]
    assert tokens[1] == 0
    logits[1] = -math.inf
    _, faulted = choose_tokens(
        logits.to(device), slots.to(device), slots.to(device), floats.to(device), ints.to(device),
        draws=True, truncates=False,
    )  # fmt: skip
    assert faulted.tolist() == [False, True, False]


@pytest.mark.parametrize(
    "truncation",
    [
        {},
        {"top_k": 1},
        {"top_k": 20},
        {"top_p": 0.3},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"top_k": 50, "top_p": 0.8, "min_p": 0.01},
    ],
)
def test_draws_are_the_references(device: torch.device, truncation: dict[str, float]) -> None:
    torch.manual_seed(0)
    rows, temperature = 4, 0.8
    floats, ints = tables(8, temperature, **truncation)  # type: ignore[arg-type]
    slots = torch.tensor([6, 1, 3, 0])
    positions = torch.tensor([5, 77, 2**33 + 1, 0])
    logits = torch.randn(rows, VOCAB) * 3
    tokens, faulted = choose_tokens(
        logits.to(device), slots.to(device), positions.to(device), floats.to(device),
        ints.to(device), draws=True, truncates=bool(truncation),
    )  # fmt: skip
    scaled = reference.scale_logits(logits, logits.amax(-1), floats[slots, 0])
    cut = reference.Truncation(floats[slots, 1], ints[slots, 0], floats[slots, 2])
    wanted = reference.draw(scaled, cut if truncation else None, ints[slots, 1], positions)
    assert tokens.tolist() == wanted.tolist()
    assert not faulted.any()


@pytest.mark.parametrize("truncation", [{}, {"top_k": 20, "top_p": 0.9}])
def test_logits_of_some_tokens_are_drawn_with_the_noise_of_these_tokens(
    device: torch.device, truncation: dict[str, float]
) -> None:
    torch.manual_seed(2)
    floats, ints = tables(8, 0.8, **truncation)  # type: ignore[arg-type]
    floats[3, 0] = float(GREEDY.value)
    ids = torch.randperm(VOCAB)[:5000].sort().values
    slots, positions = torch.tensor([6, 1, 3, -1]), torch.tensor([5, 77, 9, 0])
    logits = torch.randn(4, len(ids))
    whole = torch.full((4, VOCAB), -math.inf)
    whole[:, ids] = logits
    common = [tensor.to(device) for tensor in (slots, positions, floats, ints)]
    kind = {"draws": True, "truncates": bool(truncation)}
    some, _ = choose_tokens(logits.to(device), *common, token_ids=ids.to(device), **kind)
    every, _ = choose_tokens(whole.to(device), *common, **kind)
    assert some[:3].tolist() == every[:3].tolist()
    assert set(some.tolist()) <= set(ids.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_padding_rows_change_nothing_for_the_others(
    device: torch.device, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    floats, ints = (table.to(device) for table in tables(2, 0.8, top_k=20, top_p=0.9))
    logits = torch.randn(4, VOCAB, device=device).to(dtype)
    logits[2, 6000] = math.nan
    slots = torch.tensor([1, 0, -1, -1], device=device)
    positions = torch.tensor([3, 9, 0, 0], device=device)
    settings = {"draws": True, "truncates": True}
    padded, faulted = choose_tokens(logits, slots, positions, floats, ints, **settings)
    exact = logits[:2].float()
    alone, _ = choose_tokens(exact, slots[:2], positions[:2], floats, ints, **settings)
    assert padded[:2].tolist() == alone.tolist()
    assert not faulted[:2].any()
