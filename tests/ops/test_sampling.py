"""The reference operations against plain oracles, and the CPU draw against the reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ops import sampling, sampling_cpu
from penstock.ops.sampling import NEG_INF, Truncation

# The least chi-square statistic that has probability 1e-4 with 19 degrees of freedom.
CHI_SQUARE_19_AT_1E_4 = 52.4


def logits_of(kind: str, rows: int, vocab: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn((rows, vocab), generator=generator)
    if kind == "flat":
        return noise * 0.01
    if kind == "peaked":
        return noise * 6
    if kind == "tied":
        return (noise * 2).round()
    assert kind == "masked"
    return (noise * 3).masked_fill(torch.rand((rows, vocab), generator=generator) < 0.7, NEG_INF)


def scaled(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    best = logits.amax(-1)
    return sampling.scale_logits(logits, best, torch.full_like(best, temperature))


def truncation_of(
    rows: list[tuple[float, int, float]],
) -> Truncation:
    return Truncation(
        torch.tensor([math.log(min_p) if min_p > 0 else NEG_INF for min_p, _, _ in rows]),
        torch.tensor([top_k for _, top_k, _ in rows]),
        torch.tensor([top_p for _, _, top_p in rows], dtype=torch.float32),
    )


def oracle_survivors(row: list[float], min_p: float, top_k: int, top_p: float) -> set[int]:
    """Which tokens of one row survive, in float64 and the obvious way; ties survive together."""
    weights = [math.exp(value) for value in row]
    floor = sorted(row, reverse=True)[top_k - 1]
    kept = [
        index
        for index in range(len(row))
        if row[index] >= floor and weights[index] >= min_p * (1 - 1e-6) * max(weights)
    ]
    kept.sort(key=lambda index: -row[index])
    total, before, last = sum(weights[index] for index in kept), 0.0, kept[0]
    for index in kept:
        if top_p < 1.0 and before >= top_p * total:
            break
        before, last = before + weights[index], index
    return {index for index in kept if row[index] >= row[last]}


@pytest.mark.parametrize("kind", ["flat", "peaked", "tied", "masked"])
@pytest.mark.parametrize(
    "cut",
    [(0.0, 997, 1.0), (0.1, 997, 1.0), (0.0, 40, 1.0), (0.0, 997, 0.9), (0.02, 300, 0.7)],
)
def test_truncation_keeps_what_a_plain_oracle_keeps(
    kind: str, cut: tuple[float, int, float]
) -> None:
    rows = scaled(logits_of(kind, 6, 997, seed=3))
    cutoff = sampling.truncation_cutoff(rows, truncation_of([cut] * 6))
    for row, least in zip(rows, cutoff, strict=True):
        kept = set((row >= least).nonzero()[:, 0].tolist())
        assert kept == oracle_survivors(row.double().tolist(), *cut)


def test_the_most_likely_token_always_survives() -> None:
    rows = scaled(logits_of("peaked", 4, 100, seed=1))
    cutoff = sampling.truncation_cutoff(rows, truncation_of([(1.0, 1, 1e-30)] * 4))
    assert cutoff.tolist() == [0.0] * 4


def test_top_p_of_one_keeps_tokens_too_unlikely_to_have_mass() -> None:
    rows = torch.tensor([[0.0, -10.0, -80.0, NEG_INF]])
    assert sampling.truncation_cutoff(rows, truncation_of([(0.0, 3, 1.0)])).tolist() == [-80.0]


cuts = st.tuples(
    st.sampled_from([0.0, 0.001, 0.2, 1.0]),
    st.sampled_from([1, 2, 7, 16, 17, 60, 203]),
    st.sampled_from([0.001, 0.3, 0.9, 0.999, 1.0]),
)


@settings(max_examples=60)
@given(
    cut=st.lists(cuts, min_size=1, max_size=6),
    kind=st.sampled_from(["flat", "peaked", "tied", "masked"]),
    temperature=st.sampled_from([0.05, 1.0, 3.0]),
    head_size=st.sampled_from([1, 16, 64, 512]),
    seed=st.integers(0, 2**20),
)
def test_cpu_draw_equals_the_reference_however_much_it_looks_at(
    cut: list[tuple[float, int, float]], kind: str, temperature: float, head_size: int, seed: int
) -> None:
    rows = scaled(logits_of(kind, len(cut), 203, seed), temperature)
    seeds = torch.arange(len(cut)) * 977 + seed
    positions = torch.arange(len(cut)) * 3
    truncation = truncation_of(cut)
    expected = sampling.draw(rows, truncation, seeds, positions)
    actual = sampling_cpu.draw(rows, truncation, seeds, positions, head_size)
    assert actual.tolist() == expected.tolist()
    expected = sampling.draw(rows, None, seeds, positions)
    assert sampling_cpu.draw(rows, None, seeds, positions, head_size).tolist() == expected.tolist()


@pytest.mark.parametrize("implementation", [sampling.draw, sampling_cpu.draw])
def test_equal_scores_go_to_the_lowest_token_id(
    implementation: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "gumbel_of_groups", lambda s, p, g: torch.zeros(*g.shape, 4))
    monkeypatch.setattr(sampling_cpu, "gumbel_of_groups", lambda s, p, g: torch.zeros(len(g), 4))
    monkeypatch.setattr(sampling_cpu, "gumbel_of_tokens", lambda s, p, ids: torch.zeros(ids.shape))
    rows = torch.tensor([[-1.0, 0.0, 0.0, -3.0, 0.0], [-1.0, -1.0, -1.0, 0.0, 0.0]])
    zeros = torch.zeros(2, dtype=torch.int64)
    assert implementation(rows, None, zeros, zeros).tolist() == [1, 3]  # type: ignore[operator]


def test_reference_draw_in_chunks_equals_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = scaled(logits_of("peaked", 7, 301, seed=2))
    seeds, positions = torch.arange(7), torch.arange(7)
    whole = sampling.draw(rows, truncation_of([(0.0, 301, 0.9)] * 7), seeds, positions)
    monkeypatch.setattr(sampling, "MAX_CHUNK_ELEMENTS", 700)
    parts = sampling.draw(rows, truncation_of([(0.0, 301, 0.9)] * 7), seeds, positions)
    assert parts.tolist() == whole.tolist()


@pytest.mark.parametrize("varying", ["position", "seed"])
def test_drawn_frequencies_match_softmax(varying: str) -> None:
    num_draws, vocab = 20_000, 20
    logits = torch.randn((1, vocab), generator=torch.Generator().manual_seed(5))
    rows = scaled(logits).expand(num_draws, -1)
    counter, constant = torch.arange(num_draws), torch.full((num_draws,), 12345)
    seeds, positions = (constant, counter) if varying == "position" else (counter, constant)
    tokens = sampling_cpu.draw(rows, None, seeds, positions)
    observed = np.bincount(tokens.numpy(), minlength=vocab)
    expected = logits.double().softmax(-1)[0].numpy() * num_draws
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert statistic < CHI_SQUARE_19_AT_1E_4


def test_truncated_draws_match_the_renormalized_distribution() -> None:
    num_draws = 20_000
    logits = torch.arange(40, dtype=torch.float32)[None] * -0.1
    rows = scaled(logits).expand(num_draws, -1)
    truncation = truncation_of([(0.0, 20, 1.0)] * num_draws)
    tokens = sampling_cpu.draw(
        rows, truncation, torch.full((num_draws,), 8), torch.arange(num_draws)
    )
    observed = np.bincount(tokens.numpy(), minlength=20)
    assert len(observed) == 20
    expected = logits[0, :20].double().softmax(-1).numpy() * num_draws
    assert float(((observed - expected) ** 2 / expected).sum()) < CHI_SQUARE_19_AT_1E_4


def test_penalties_follow_the_published_formulas() -> None:
    logits = torch.tensor([[7.0] * 5, [2.0, -2.0, 1.0, 0.5, -1.0]])
    tokens = torch.tensor([[0, 4, 4, 1, 2, 1, 1, -3]], dtype=torch.int32)
    is_prompt = torch.tensor([[True] * 3 + [False] * 5])
    is_output = torch.tensor([[False] * 3 + [True] * 4 + [False]])
    two, quarter, half = torch.tensor([2.0]), torch.tensor([0.25]), torch.tensor([0.5])
    sampling.apply_penalties(
        logits, torch.tensor([1]), tokens, is_prompt, is_output, two, quarter, half
    )
    # prompt: repetition only; output: repetition, then frequency * count and presence
    assert logits[1].tolist() == [1.0, -4.0 - 0.75 - 0.5, 0.5 - 0.25 - 0.5, 0.5, -2.0]
    assert logits[0].tolist() == [7.0] * 5


def test_token_counts_ignore_what_is_not_valid() -> None:
    ids = torch.tensor([[1, 1, 3, -7], [0, 2, 2, 99]], dtype=torch.int32)
    valid = torch.tensor([[True, True, True, False], [False, True, True, False]])
    assert sampling.token_counts(ids, valid, 4).tolist() == [[0, 2, 0, 1], [0, 0, 2, 0]]


def test_bitmask_unpacks_the_lowest_bit_first() -> None:
    bits = torch.tensor([[0b1011, -(2**31)], [0, 1]], dtype=torch.int32)
    mask = sampling.unpack_bitmask(bits, 64)
    assert mask[0].nonzero()[:, 0].tolist() == [0, 1, 3, 63]
    assert mask[1].nonzero()[:, 0].tolist() == [32]
    assert sampling.unpack_bitmask(bits, 40).shape == (2, 40)


def test_top_logprobs_do_not_depend_on_how_many_are_asked_for() -> None:
    logits = logits_of("tied", 3, 211, seed=4)
    logits[1, :100] = NEG_INF
    tokens = torch.tensor([0, 150, 210])
    everything = sampling.top_logprobs(logits, tokens, 211)
    expected = logits.double().log_softmax(-1)
    assert torch.allclose(everything.top_logprobs.double(), expected.gather(1, everything.top_ids))
    for row in range(3):
        order = sorted(range(211), key=lambda id: (-logits[row, id].item(), id))
        assert everything.top_ids[row].tolist() == order
        chosen = logits[row, tokens[row]]
        assert everything.ranks[row] == 1 + int((logits[row] > chosen).sum())
    for k in (0, 1, 5, 60):
        some = sampling.top_logprobs(logits[1:2], tokens[1:2], k)
        assert some.top_ids.tolist() == everything.top_ids[1:2, :k].tolist()
        assert torch.equal(some.top_logprobs, everything.top_logprobs[1:2, :k])
        assert torch.equal(some.logprobs, everything.logprobs[1:2])
