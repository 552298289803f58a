"""A row's token depends on its logits, its request and its position: never on its neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import sampler_oracle as oracle
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runner.sampler import Sampler, SamplingRows

optional = st.booleans()


pytestmark = pytest.mark.usefixtures("implementation")


@st.composite
def any_case(draw: st.DrawFn) -> oracle.Case:
    """A request with any combination of features."""
    params: dict[str, Any] = {"temperature": draw(st.sampled_from([0.0, 0.3, 1.0, 2.0]))}
    choices: dict[str, st.SearchStrategy[Any]] = {
        "top_p": st.sampled_from([0.1, 0.8, 0.95]),
        "top_k": st.integers(1, oracle.VOCAB),
        "min_p": st.sampled_from([0.05, 0.5]),
        "repetition_penalty": st.sampled_from([0.7, 1.2]),
        "frequency_penalty": st.sampled_from([-0.5, 0.7]),
        "presence_penalty": st.sampled_from([-0.5, 0.7]),
        "logit_bias": st.dictionaries(
            st.integers(0, oracle.VOCAB - 1), st.floats(-5, 5), max_size=6
        ),
        "allowed_token_ids": st.lists(st.integers(0, oracle.VOCAB - 1), min_size=8, max_size=40),
        "min_tokens": st.integers(0, 16),
        "logprobs": st.integers(-1, 8),
    }
    for name, values in choices.items():
        if draw(optional):
            params[name] = draw(values)
    tokens = draw(st.lists(st.integers(0, oracle.VOCAB - 1), min_size=12, max_size=12))
    num_prompt = draw(st.integers(1, 6))
    bad_words = []
    if draw(optional):
        bad_words = draw(
            st.lists(
                st.lists(st.integers(0, oracle.VOCAB - 1), min_size=1, max_size=3),
                min_size=1,
                max_size=4,
            )
        )
    request = oracle.make_request(
        tokens[:num_prompt],
        seed=draw(st.integers(0, 2**64 - 1)),
        eos=[2],
        bad_words=bad_words,
        **params,
    )
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    logits = (random.standard_normal(oracle.VOCAB) * 4).astype(np.float32)
    return oracle.Case(request, tokens, draw(st.integers(num_prompt, 12)), logits)


def outcome(sampler: Sampler, logits: torch.Tensor, rows: SamplingRows) -> list[Any]:
    """Everything that is returned for each row, logprobs to the last bit."""
    sampled = sampler.sample(logits, rows)
    logprobs = sampled.logprobs.by_row() if sampled.logprobs else {}
    tokens, faulted = sampled.token_ids.tolist(), sampled.faulted.tolist()
    return [(tokens[row], faulted[row], logprobs.get(row)) for row in range(len(tokens))]


@settings(max_examples=30)
@given(
    cases=st.lists(any_case(), min_size=1, max_size=oracle.NUM_SLOTS),
    order=st.randoms(use_true_random=False),
)
def test_a_row_gets_the_same_alone_among_others_shuffled_and_in_another_slot(
    cases: list[oracle.Case], order: Any
) -> None:
    together = outcome(*oracle.set_up(cases))
    assert together == [outcome(*oracle.set_up([case]))[0] for case in cases]
    places = list(range(len(cases)))
    order.shuffle(places)
    slots = order.sample(range(oracle.NUM_SLOTS), len(cases))
    shuffled = outcome(*oracle.set_up([cases[place] for place in places], slots))
    assert [shuffled[places.index(row)] for row in range(len(cases))] == together


@settings(max_examples=20)
@given(cases=st.lists(any_case(), min_size=1, max_size=4))
def test_several_positions_of_a_request_at_once_equal_one_position_at_a_time(
    cases: list[oracle.Case],
) -> None:
    """As when drafted tokens are checked: the table already holds what lies ahead."""
    sampler, _, _ = oracle.set_up(cases)
    slots, positions = [], []
    for slot, case in enumerate(cases):
        for position in range(case.request.num_prompt_tokens, 13):
            slots.append(slot)
            positions.append(position)
    logits = torch.from_numpy(
        np.stack([np.roll(cases[s].logits, p) for s, p in zip(slots, positions, strict=True)])
    )
    together = outcome(sampler, logits, oracle.make_rows(slots, positions))
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        case = cases[slot]
        alone = oracle.Case(case.request, case.tokens[:position], position, logits[row].numpy())
        assert outcome(*oracle.set_up([alone]))[0] == together[row]


@settings(max_examples=15)
@given(
    cases=st.lists(any_case(), min_size=4, max_size=8),
    moves=st.lists(st.tuples(st.integers(0, 7), st.integers(0, oracle.NUM_SLOTS - 1)), max_size=40),
)
def test_requests_that_come_and_go_leave_no_trace(
    cases: list[oracle.Case], moves: list[tuple[int, int]]
) -> None:
    tables = oracle.FakeTables()
    sampler = oracle.make_sampler(tables)
    held: dict[int, oracle.Case] = {}
    for number, slot in moves:
        if slot in held:
            sampler.remove(slot)
            del held[slot]
            continue
        case = cases[number % len(cases)]
        tables.token_ids[slot, : len(case.tokens)] = torch.tensor(case.tokens, dtype=torch.int32)
        tables.num_prompt_tokens[slot] = case.request.num_prompt_tokens
        sampler.add(slot, case.request)
        held[slot] = case
        logits = torch.from_numpy(np.stack([case.logits for case in held.values()]))
        rows = oracle.make_rows(list(held), [case.position for case in held.values()])
        expected = [outcome(*oracle.set_up([case]))[0] for case in held.values()]
        assert outcome(sampler, logits, rows) == expected


@pytest.fixture
def two_torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_torch_threads")
def test_a_large_vocabulary_gives_a_row_the_same_alone_and_among_others() -> None:
    """Rows long enough for vectorized and threaded code, where results could depend on place."""
    vocab, num_rows = 50_003, 12
    tables = oracle.FakeTables()
    sampler = oracle.make_sampler(tables, vocab)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((num_rows, vocab), generator=generator) * 2.5
    variants: list[dict[str, Any]] = [
        {"temperature": 0.8, "top_p": 0.95},
        {"temperature": 1.0},
        {"temperature": 1.5, "top_p": 0.5, "logprobs": 4},
        {"temperature": 1.0, "top_k": 2000, "min_p": 1e-4},
        {"temperature": 0.3, "top_k": 50},
        {"temperature": 0.0, "logprobs": 2},
    ]
    for slot in range(num_rows):
        sampler.add(slot, oracle.make_request([1], seed=slot, **variants[slot % len(variants)]))
    together = outcome(sampler, logits, oracle.make_rows(list(range(num_rows)), [3] * num_rows))
    for slot in range(num_rows):
        alone = outcome(sampler, logits[slot : slot + 1], oracle.make_rows([slot], [3]))
        assert alone[0] == together[slot]
