"""Each feature of the sampler, and all together, against a one-row-at-a-time oracle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sampler_oracle import (
    NUM_SLOTS,
    VOCAB,
    Case,
    FakeTables,
    make_request,
    make_rows,
    make_sampler,
    oracle,
    processed_logits,
    sample_alone,
    set_up,
)

from penstock.protocol.step import TokenLogprobs
from penstock.runner import sampler as sampler_module
from penstock.runner.logprobs import prompt_logprobs, token_logprobs
from penstock.runner.sampler import SamplingRows

pytestmark = pytest.mark.usefixtures("implementation")

EVERYTHING: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.9,
    "top_k": 30,
    "min_p": 0.01,
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "presence_penalty": -0.3,
    "logit_bias": {3: 4.0, 11: -6.0},
    "allowed_token_ids": list(range(2, 60)),
    "min_tokens": 8,
    "stop_token_ids": [21],
    "max_tokens": 30,
}

FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 5.0},
    "top_k": {"top_k": 5},
    "top_k of everything": {"top_k": -1},
    "top_k beyond the vocabulary": {"top_k": 10_000},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.8},
    "encouraged repetition": {"temperature": 0.0, "repetition_penalty": 0.5},
    "frequency": {"temperature": 0.0, "frequency_penalty": 2.0},
    "presence": {"temperature": 0.0, "presence_penalty": 1.5},
    "bias": {"temperature": 0.0, "logit_bias": {5: 100.0, 900: 1.0}},
    "allowed": {"temperature": 0.0, "allowed_token_ids": [4, 9, 9, 900]},
    "min tokens": {"temperature": 0.0, "min_tokens": 6, "max_tokens": 9},
    "everything": EVERYTHING,
}


def make_case(index: int, **params: Any) -> Case:
    """A request with some prompt and output; its logits favour tokens that it has already."""
    random = np.random.default_rng(index)
    tokens = random.integers(0, VOCAB, size=20).tolist()
    num_prompt = int(random.integers(1, 10))
    position = int(random.integers(num_prompt, 20))
    logits = (random.standard_normal(VOCAB) * 3).astype(np.float32)
    logits[tokens[:position]] += 3.0
    likely = int(logits.argmax())
    bad_words = params.pop("bad_words", [])
    request = make_request(
        tokens[:num_prompt],
        seed=int(random.integers(0, 2**64, dtype=np.uint64)),
        eos=[likely, 800],
        bad_words=bad_words,
        **params,
    )
    return Case(request, tokens, position, logits)


@pytest.mark.parametrize("name", FEATURES)
def test_feature_gives_the_oracles_tokens(name: str) -> None:
    for start in range(0, 36, NUM_SLOTS):
        cases = [make_case(start + index, **FEATURES[name]) for index in range(NUM_SLOTS)]
        sampler, logits, rows = set_up(cases)
        result = sampler.sample(logits, rows)
        assert not result.faulted.any()
        assert result.token_ids.tolist() == [oracle(case) for case in cases]


def test_rows_of_all_features_in_one_batch_give_the_oracles_tokens() -> None:
    names = list(FEATURES)
    for start in range(0, 4 * len(names), NUM_SLOTS):
        cases = [
            make_case(100 + start + index, **FEATURES[names[(start + index) % len(names)]])
            for index in range(NUM_SLOTS)
        ]
        sampler, logits, rows = set_up(cases)
        assert sampler.sample(logits, rows).token_ids.tolist() == [oracle(case) for case in cases]


def test_features_change_tokens_at_all() -> None:
    """Guards the oracle tests: the cases must be ones where the features matter."""
    for name, params in FEATURES.items():
        if name.startswith("top_k ") or name in ("greedy", "temperature", "hot"):
            continue
        plain = {"temperature": params.get("temperature", 1.0)}
        changed = [
            oracle(make_case(index, **params)) != oracle(make_case(index, **plain))
            for index in range(36)
        ]
        assert any(changed), name


def test_the_logits_given_are_left_as_they_are() -> None:
    sampler, logits, rows = set_up([make_case(1, **EVERYTHING), make_case(2, temperature=0.0)])
    before = logits.clone()
    sampler.sample(logits, rows, torch.full((2, 3), -1, dtype=torch.int32))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_sampled_in_float32(dtype: torch.dtype) -> None:
    cases = [make_case(index, **EVERYTHING) for index in range(6)]
    for case in cases:
        case.logits = torch.from_numpy(case.logits).to(dtype).float().numpy()
    sampler, logits, rows = set_up(cases)
    result = sampler.sample(logits.to(dtype), rows)
    assert result.token_ids.tolist() == [oracle(case) for case in cases]


def test_a_plain_greedy_batch_needs_one_maximum_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampler, logits, rows = set_up([make_case(index, temperature=0.0) for index in range(4)])
    monkeypatch.setattr(sampler, "_change_logits", None)
    monkeypatch.setattr(sampler_module, "to_device", None)
    assert sampler.sample(logits, rows).token_ids.tolist() == logits.argmax(-1).tolist()


def test_a_tiny_temperature_is_greedy() -> None:
    for temperature in (1e-3, 1e-30, 1e-320):
        cases = [make_case(index, temperature=temperature) for index in range(NUM_SLOTS)]
        sampler, logits, rows = set_up(cases)
        result = sampler.sample(logits, rows)
        assert not result.faulted.any()
        assert result.token_ids.tolist() == logits.argmax(-1).tolist()


def test_min_tokens_bans_stops_until_enough_are_out() -> None:
    case = make_case(0, temperature=0.0, min_tokens=3, max_tokens=9)
    eos = case.request.eos_token_ids[0]
    num_prompt = case.request.num_prompt_tokens
    for num_outputs, may_stop in ((0, False), (2, False), (3, True), (4, True)):
        case.position = num_prompt + num_outputs
        assert (sample_alone(case) == eos) is may_stop


def test_min_tokens_leaves_end_of_text_alone_if_it_is_ignored_anyway() -> None:
    case = make_case(0, temperature=0.0, min_tokens=20, max_tokens=30, ignore_eos=True)
    assert sample_alone(case) == case.request.eos_token_ids[0]


@pytest.mark.parametrize(
    ("tokens", "position", "words", "banned"),
    [
        ([1, 2, 3], 3, [[9]], {9}),  # one token: always
        ([1, 2, 3], 3, [[2, 3, 9]], {9}),
        ([1, 2, 3], 3, [[1, 3, 9]], set()),
        ([1, 2, 3], 3, [[3, 9], [2, 8], [1, 2, 3, 7], [0, 1, 2, 3, 6]], {9, 7}),
        ([1, 2, 3], 2, [[3, 9], [2, 8]], {8}),  # what lies beyond the position does not count
        ([1], 1, [[5, 5, 5, 1, 9], [1, 8]], {8}),  # longer than the history
        ([1, 2, 3], 3, [[3, 900], [900, 9], []], set()),  # beyond the vocabulary
    ],
)
def test_bad_words_ban_the_token_that_would_complete_them(
    tokens: list[int], position: int, words: list[list[int]], banned: set[int]
) -> None:
    for token in (9, 8, 7, 6):
        logits = np.zeros(VOCAB, dtype=np.float32)
        logits[token], logits[50] = 5.0, 4.0
        request = make_request([1], temperature=0.0, bad_words=words)
        chosen = sample_alone(Case(request, tokens, position, logits))
        assert chosen == (50 if token in banned else token)


def test_bad_words_of_different_shapes_do_not_disturb_each_other() -> None:
    words = [[[9]], [[2, 3, 9], [8]], [[1, 2, 3, 4, 9]], []]
    cases = []
    for index, bad_words in enumerate(words):
        case = make_case(index, temperature=0.0)
        case.request = make_request(case.request.token_ids, temperature=0.0, bad_words=bad_words)
        case.logits[9] = 50.0
        cases.append(case)
    sampler, logits, rows = set_up(cases)
    assert sampler.sample(logits, rows).token_ids.tolist() == [oracle(case) for case in cases]


def test_a_grammar_mask_is_obeyed() -> None:
    cases = [make_case(0, temperature=0.0), make_case(1), make_case(2, **EVERYTHING)]
    sampler, logits, rows = set_up(cases)
    bits = torch.zeros((3, 3), dtype=torch.int32)
    bits[0, 2], bits[1, 1], bits[2, 0] = 1, 2, 128
    assert sampler.sample(logits, rows, bits).token_ids.tolist() == [64, 33, 7]
    plain, logits, rows = set_up(cases[:2])
    assert plain.sample(logits, rows, bits[:2]).token_ids.tolist() == [64, 33]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, EVERYTHING], ids=str)
@pytest.mark.parametrize(
    "damage",
    [
        lambda row: row.__setitem__(30, math.nan),
        lambda row: row.__setitem__(30, math.inf),
        lambda row: row.fill(-math.inf),
        lambda row: row.fill(math.nan),
        lambda row: row.__setitem__(66, math.nan),  # a token that EVERYTHING does not allow
    ],
    ids=["nan", "inf", "all -inf", "all nan", "masked nan"],
)
def test_a_damaged_row_faults_alone(params: dict[str, Any], damage: Any) -> None:
    cases = [make_case(index, **params) for index in range(5)]
    expected = [oracle(case) for case in cases]
    damage(cases[2].logits)
    sampler, logits, rows = set_up(cases)
    result = sampler.sample(logits, rows)
    assert result.faulted.tolist() == [False, False, True, False, False]
    expected[2] = 0
    assert result.token_ids.tolist() == expected


def test_a_row_with_no_token_left_to_choose_faults() -> None:
    nothing = make_case(0, temperature=0.0, allowed_token_ids=[5])
    nothing.request = make_request([1], allowed_token_ids=[5], bad_words=[[5]])
    unknown = make_case(1, allowed_token_ids=[900])
    fine = make_case(2, allowed_token_ids=[5])
    sampler, logits, rows = set_up([nothing, unknown, fine])
    result = sampler.sample(logits, rows)
    assert result.faulted.tolist() == [True, True, False]
    assert result.token_ids.tolist() == [0, 0, 5]


def test_logprobs_are_of_the_raw_logits_and_cut_to_what_each_row_asked_for() -> None:
    asked = [None, 3, 0, -1, 5]
    cases = [make_case(index, **EVERYTHING, logprobs=k) for index, k in enumerate(asked)]
    sampler, logits, rows = set_up(cases)
    sampled = sampler.sample(logits, rows).to_host()
    assert sampled.logprobs is not None
    found = sampled.logprobs.by_row()
    assert sorted(found) == [1, 2, 3, 4]
    for row, entry in found.items():
        raw = torch.from_numpy(cases[row].logits).double().log_softmax(-1).tolist()
        token = oracle(cases[row])
        count = VOCAB if asked[row] == -1 else asked[row]
        order = sorted(range(VOCAB), key=lambda id: -raw[id])
        assert entry.token_ids == [token, *order[:count]]
        assert entry.logprobs == pytest.approx([raw[id] for id in entry.token_ids], abs=1e-5)
        assert entry.rank == order.index(token) + 1


def test_named_logprobs_stand_beside_the_most_likely_of_other_rows() -> None:
    asked: list[dict[str, Any]] = [
        {"logprob_token_ids": [7, 3, 11]},
        {"logprobs": 2},
        {},
        {"logprob_token_ids": [0], "logprobs": 5},  # which do not count then
    ]
    cases = [make_case(index, **fields) for index, fields in enumerate(asked)]
    sampler, logits, rows = set_up(cases)
    sampled = sampler.sample(logits, rows)
    assert sampled.logprobs is not None
    found = sampled.logprobs.by_row()
    assert set(found) == {0, 1, 3}
    raw = logits.double().log_softmax(-1)
    for row, entry in found.items():
        assert entry.token_ids[0] == int(sampled.token_ids[row])
        expected = [float(raw[row, token_id]) for token_id in entry.token_ids]
        assert entry.logprobs == pytest.approx(expected, abs=1e-5)
    assert found[0].token_ids[1:] == [7, 3, 11]
    assert found[1].token_ids[1:] == raw[1].topk(2).indices.tolist()
    assert found[3].token_ids[1:] == [0]


def test_processed_logprobs_know_the_masks() -> None:
    cases = [make_case(0, temperature=0.0, logprobs=3), make_case(1, temperature=0.0)]
    sampler, logits, rows = set_up(cases)
    sampler._logprobs_mode = "processed_logprobs"
    allowed = torch.full((2, (VOCAB + 31) // 32), -1, dtype=torch.int32)
    allowed[0] = 0
    allowed[0, 0] = 0b110  # tokens 1 and 2
    logprobs = sampler.sample(logits, rows, allowed).logprobs
    assert logprobs is not None
    (entry,) = logprobs.by_row().values()
    by_token = dict(zip(entry.token_ids, entry.logprobs, strict=True))
    kept = logits[0, 1:3].log_softmax(-1).tolist()
    assert [by_token[1], by_token[2]] == pytest.approx(kept, abs=1e-5)
    assert sorted(by_token.values())[0] == -math.inf


def test_named_logprobs_change_no_choice() -> None:
    plain, named = make_case(0), make_case(0, logprob_token_ids=[1])
    tokens = []
    for case in (plain, named):
        sampler, logits, rows = set_up([case])
        assert sampler.kind_of(rows) is not None  # nor how it is made
        tokens.append(sampler.sample(logits, rows).token_ids.tolist())
    assert tokens[0] == tokens[1]


def test_logprobs_alone_leave_a_greedy_row_greedy() -> None:
    case = make_case(0, temperature=0.0, logprobs=1)
    sampler, logits, rows = set_up([case])
    logprobs = sampler.sample(logits, rows).logprobs
    assert logprobs is not None
    entry = logprobs.by_row()[0]
    assert entry.token_ids == [oracle(case)] * 2
    assert entry.rank == 1


def test_no_logprobs_are_computed_where_nobody_asks() -> None:
    sampler, logits, rows = set_up([make_case(0)])
    assert sampler.sample(logits, rows).logprobs is None
    assert sampler.sample(logits, rows).logprobs is None


def test_prompt_logprobs_are_those_of_the_target_tokens() -> None:
    logits = torch.tensor([[0.0, math.log(3.0), math.log(4.0)], [math.log(2.0), 0.0, 0.0]])
    entries = token_logprobs(prompt_logprobs(logits, torch.tensor([1, 0]), 1), [1, 1])
    assert [entry.token_ids for entry in entries] == [[1, 2], [0, 0]]
    assert entries[0].logprobs == pytest.approx([math.log(3 / 8), math.log(4 / 8)])
    assert [entry.rank for entry in entries] == [2, 1]
    everything = token_logprobs(prompt_logprobs(logits, torch.tensor([1, 0]), -1), [3, 3])
    assert everything[1] == TokenLogprobs([0, 0, 1, 2], everything[1].logprobs, 1)


def test_a_slot_forgets_the_request_that_left() -> None:
    tables = FakeTables()
    sampler = make_sampler(tables)
    first, second = make_case(3, **EVERYTHING, logprobs=2), make_case(4)
    for _ in range(3):
        for case in (first, second):
            tables.token_ids[7, : len(case.tokens)] = torch.tensor(case.tokens)
            tables.num_prompt_tokens[7] = case.request.num_prompt_tokens
            sampler.add(7, case.request)
            result = sampler.sample(
                torch.from_numpy(case.logits)[None], make_rows([7], [case.position])
            )
            assert result.token_ids.tolist() == [oracle(case)]
            assert (result.logprobs is not None) is (case is first)
            sampler.remove(7)


def test_repetition_penalty_agrees_with_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    case = make_case(9, temperature=0.0, repetition_penalty=1.7)
    history = torch.tensor([case.tokens[: case.position]])
    theirs = RepetitionPenaltyLogitsProcessor(1.7)(history, torch.from_numpy(case.logits)[None])
    assert theirs[0].tolist() == pytest.approx(processed_logits(case), rel=1e-6)
    assert sample_alone(case) == int(theirs.argmax())


def test_a_step_without_rows_samples_nothing() -> None:
    sampler = make_sampler(FakeTables())
    none = SamplingRows(
        torch.empty(0, dtype=torch.int64),
        torch.empty(0, dtype=torch.int64),
        np.empty(0, dtype=np.int64),
        0,
    )
    assert sampler.sample(torch.empty((0, VOCAB)), none).token_ids.tolist() == []
