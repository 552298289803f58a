"""A budget brings reasoning to its end, whatever the engine does around the request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from byte_model import open_llm
from drafters import Oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engine import prepare_replay

from penstock import LLM, SamplingParams
from penstock import StructuredOutputsParams as Structured
from penstock.protocol.errors import InputError
from penstock.structured.reasoning import Phase, Reasoning

CLOSING = "\n</think>\n\n"  # of the reasoning parser
# Bytes of characters of one to three bytes, and pieces of the marker.
PIECES = [b"a", b"\xc3", b"\xa9", b"\xe2", b"\x82", b"\xac", b"<", b"/end", b">", b"<start>"]
CLOSE = [*range(6, 9), 0]  # </end>a


@settings(max_examples=300)
@given(
    tokens=st.lists(st.integers(0, len(PIECES) - 1), max_size=30),
    budget=st.integers(0, 8),
    is_open=st.booleans(),
)
def test_what_is_forced_follows_from_the_tokens(
    tokens: list[int], budget: int, is_open: bool
) -> None:
    starts = () if is_open else (b"<start>",)
    reasoning = Reasoning(PIECES, (b"</end>",), starts, budget, closing=tuple(CLOSE))
    state = reasoning.begin()
    text, num_thought = b"", 0
    for token_id in tokens:
        forced = reasoning.forced(state)
        before = state.phase
        if before is Phase.CLOSING and state.num_tokens == 0:
            assert num_thought >= budget
            assert b"</end>" not in text
        taken = token_id if forced is None else forced
        state = reasoning.after(state, taken)
        if before is Phase.THINKING:
            text += PIECES[taken]
            num_thought += 1
        if before is Phase.OVER:
            assert state.phase is Phase.OVER
    # A marker of three pieces, or a character of three bytes, is waited for: no more.
    if state.phase is Phase.THINKING and b"</end>" not in text:
        assert num_thought < budget + 12 or set(text) <= set(b"\xc3\xe2<")


def test_the_end_waits_for_a_whole_character() -> None:
    reasoning = Reasoning(PIECES, (b"</end>",), budget=1, closing=tuple(CLOSE))
    state = reasoning.after(reasoning.begin(), 3)  # the first of three bytes
    assert reasoning.forced(state) is None
    for token_id in (4, 5):
        assert reasoning.forced(state) is None
        state = reasoning.after(state, token_id)
    assert reasoning.forced(state) == CLOSE[0]


def test_an_opening_is_forced_and_any_end_counts() -> None:
    reasoning = Reasoning(PIECES, (b"</end>", b"aa"), budget=3, opening=(0, 6), closing=(0, 0))
    state = reasoning.begin()
    for token_id in reasoning.opening:
        assert reasoning.forced(state) == token_id
        state = reasoning.after(state, token_id)
    assert state.phase is Phase.THINKING  # of which the opening is no part
    for token_id in (6, 0, 0):
        assert reasoning.forced(state) is None
        state = reasoning.after(state, token_id)
    assert state.phase is Phase.OVER


PROMPTS = ["Some text: ", "A longer beginning, which takes several blocks of the cache: "]
DIGITS = Structured(regex="[0-9]{5}", reasoning_end="</think>")


def requests() -> list[tuple[str, SamplingParams]]:
    return [
        (
            prompt,
            SamplingParams(
                max_tokens=45, seed=seed, thinking_token_budget=budget, structured_outputs=spec
            ),
        )
        for prompt in PROMPTS
        for budget in (0, 5, 17, -1)
        for spec in (None, DIGITS)
        for seed in (1, 2)
    ]


@pytest.fixture(scope="module")
def llm(byte_model: str) -> Iterator[LLM]:
    with open_llm(byte_model, reasoning_parser="deepseek_r1") as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    return [
        llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
        for prompt, params in requests()
    ]


def test_reasoning_ends_at_its_budget_and_the_answer_follows(
    llm: LLM, alone: list[list[int]]
) -> None:
    tokenizer = llm.get_tokenizer()
    closing = tokenizer.encode(CLOSING, add_special_tokens=False)
    marker = tokenizer.encode("</think>", add_special_tokens=False)
    num_forced = 0
    for (_, params), tokens in zip(requests(), alone, strict=True):
        budget = params.thinking_token_budget
        assert budget is not None
        ends = [i for i in range(len(tokens)) if tokens[i : i + len(marker)] == marker]
        if budget < 0 or not ends or ends[0] < budget:
            continue  # it ended by itself, or never
        num_forced += 1
        at = ends[0] - closing.index(marker[0])
        assert budget <= at <= budget + 3  # bytes that a character still needs
        if params.structured_outputs is None:
            assert tokens[at : at + len(closing)] == closing
            assert len(tokens) == 45 or tokens[-1] in tokenizer.end_ids
        else:
            answer = tokenizer.decode(tokens[ends[0] + len(marker) :])
            assert answer.isdecimal()
            assert len(answer) == 5
    assert num_forced >= 20  # of the 24 that have a budget


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"num_gpu_blocks_override": 14, "enable_prefix_caching": False},
        {"async_scheduling": True},
    ],
    ids=["together", "chunked", "preempted", "in flight"],
)
def test_the_same_tokens_whatever_the_engine_does(
    byte_model: str, alone: list[list[int]], options: dict[str, Any]
) -> None:
    prompts, params = zip(*requests(), strict=True)
    with open_llm(byte_model, reasoning_parser="deepseek_r1", **options) as llm:
        outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == alone
        if "num_gpu_blocks_override" in options:
            assert llm.engine.stats().num_preemptions > 0


def test_the_same_tokens_with_drafts(byte_model: str, alone: list[list[int]]) -> None:
    oracle = Oracle(alone, wrong=100)
    prompts, params = zip(*requests(), strict=True)
    with open_llm(byte_model, reasoning_parser="deepseek_r1", drafter=oracle) as llm:
        outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == alone
    assert oracle.num_accepted > 100


def test_a_replay_goes_on_as_the_original(llm: LLM, alone: list[list[int]]) -> None:
    for (prompt, params), tokens in zip(requests()[:8], alone[:8], strict=True):
        for cut in (1, 6, len(tokens) // 2, len(tokens) - 1):
            request = prepare_replay(llm, prompt, params, tokens[:cut])
            (output,) = llm._run([request], use_tqdm=False)
            assert output.outputs[0].token_ids == tokens


def test_a_budget_needs_a_model_whose_reasoning_is_known(byte_model: str, llm: LLM) -> None:
    params = SamplingParams(thinking_token_budget=4, allowed_token_ids=[5])
    with pytest.raises(InputError, match="must contain those that end the reasoning"):
        llm.generate("x", params, use_tqdm=False)
    with pytest.raises(InputError, match="thinking_token_budget must be at least -1"):
        SamplingParams(thinking_token_budget=-2)
