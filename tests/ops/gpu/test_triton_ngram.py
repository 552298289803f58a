"""N-gram drafts on a GPU against those of the host."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import SpeculativeSettings
from penstock.runner.drafters import make_drafter
from penstock.runner.drafters.ngram import NgramIndex

pytest.importorskip("triton", reason="needs Triton")

from penstock.ops.triton import ngram
from penstock.runner.drafters.device_ngram import DeviceNgramDrafter

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTH = 48


def check(texts: list[list[int]], num_drafts: int, shortest: int, longest: int) -> None:
    """Texts are in every second slot. What is behind them must not matter."""
    table = torch.full((2 * len(texts), LENGTH), 1, dtype=torch.int32)
    num_tokens = torch.zeros(2 * len(texts), dtype=torch.int32)
    expected = []
    for row, text in enumerate(texts):
        table[2 * row, : len(text)] = torch.tensor(text)
        num_tokens[2 * row] = len(text)
        index = NgramIndex(shortest, longest)
        index.extend(text)
        match = index.find()
        found = [text[-1]] * num_drafts if match is None else index.following(match[1], num_drafts)
        expected.append(found)
    slots = torch.arange(len(texts)) * 2
    slots = torch.cat([slots, torch.tensor([-1])]).to(DEVICE)
    best = torch.zeros(2 * len(texts) + 1, dtype=torch.int64, device=DEVICE)
    drafts = ngram.ngram_drafts(
        slots, table.to(DEVICE), num_tokens.to(DEVICE), best, num_drafts, shortest, longest
    )
    assert drafts[: len(texts)].tolist() == expected
    assert not best.any()


def test_the_longest_match_wins_and_of_several_the_last() -> None:
    check([[1, 2, 3, 7, 2, 3, 8, 3, 9, 1, 2, 3]], 3, 2, 3)  # 7 2 3
    check([[5, 2, 3, 7, 4, 2, 3, 8, 6, 2, 3]], 4, 2, 5)  # 8 6 2 3
    check([[1, 2], [4, 4, 4, 4], [1, 2, 3, 4, 5]], 5, 1, 4)  # none, itself again, none
    check([[6]], 2, 1, 3)


@settings(max_examples=15)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=LENGTH), min_size=1, max_size=3),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_drafts_are_those_of_the_host(
    texts: list[list[int]], num_drafts: int, shortest: int, more: int
) -> None:
    check(texts, num_drafts, shortest, shortest + more)


def test_a_long_text_is_shared_by_several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "CHUNK", 8)
    monkeypatch.setattr(ngram, "SPLITS", 3)
    text = torch.randint(0, 3, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    check(text.tolist(), 4, 1, 6)


def test_a_gpu_has_a_drafter_of_its_own() -> None:
    settings = SpeculativeSettings.parse({"method": "ngram", "num_speculative_tokens": 4})
    drafter = make_drafter(settings, {"vocab_size": 99}, on_gpu=True)
    assert isinstance(drafter, DeviceNgramDrafter)
    assert (drafter.num_drafts, drafter.is_on_host) == (4, False)
    assert not isinstance(make_drafter(settings, {"vocab_size": 99}), DeviceNgramDrafter)
