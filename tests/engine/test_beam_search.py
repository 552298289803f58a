"""Beam search chooses the sequences that transformers chooses."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
import torch
from tiny_engine import open_llm
from transformers import AutoModelForCausalLM

from penstock import LLM, BeamSearchParams, SamplingParams
from penstock.engine.beam_search import beam_outputs
from penstock.engine.observer import RequestRecord
from penstock.engine.offline_metrics import Histogram
from penstock.protocol.delta import FinishReason
from penstock.protocol.errors import EngineDeadError, InputError
from penstock.protocol.outputs import RequestOutput
from penstock.text.frontend import PreparedRequest

PAD = 3
draw = random.Random(5)
PROMPTS = [[draw.randrange(5, 100) for _ in range(draw.randrange(3, 30))] for _ in range(20)]


@pytest.fixture(scope="module")
def llm(tiny_llama: str) -> LLM:
    return open_llm(tiny_llama, max_model_len=64)


@pytest.fixture(scope="module")
def reference(tiny_llama: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)


@pytest.mark.parametrize(
    ("width", "length_penalty", "eos"),
    [
        (1, 1.0, [2]),
        (4, 1.0, list(range(20, 40))),
        (3, 0.0, [2, 7]),
        (5, -1.5, list(range(60, 99))),
    ],
)
def test_beams_equal_those_of_transformers(
    llm: LLM, reference: Any, width: int, length_penalty: float, eos: list[int]
) -> None:
    params = BeamSearchParams(
        beam_width=width, max_tokens=9, length_penalty=length_penalty,
        include_stop_str_in_output=True,
    )  # fmt: skip
    llm.frontend.eos_token_ids = eos  # many, so that sequences end at different lengths
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    found = llm.beam_search(prompts, params, concurrency_limit=7)
    ended = 0
    for prompt, output in zip(PROMPTS, found, strict=True):
        beams: dict[str, Any] = {"num_beams": width, "num_return_sequences": width}
        if width > 1:
            beams |= {"length_penalty": length_penalty, "early_stopping": False}
        rows = reference.generate(
            torch.tensor([prompt]),
            max_new_tokens=9,
            eos_token_id=eos,
            pad_token_id=PAD,
            do_sample=False,
            **beams,
        ).tolist()
        for sequence, row in zip(output.sequences, rows, strict=True):
            tokens = sequence.tokens
            assert tokens + [PAD] * (len(row) - len(tokens)) == row
            if sequence.finish_reason == "stop":
                assert sequence.stop_reason == tokens[-1]
                ended += 1
    assert ended > 0 or len(eos) == 1


def test_equal_words_are_cheap_to_ask_for_again(llm: LLM) -> None:
    """The prompt of a later step is in the prefix cache but for its last block."""
    before = llm.engine.stats().num_prefix_hits
    params = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
    llm.beam_search({"prompt_token_ids": list(range(5, 55))}, params)
    assert llm.engine.stats().num_prefix_hits - before >= 3 * 2 * 48


def test_the_end_of_a_sequence_is_left_out_unless_asked_for(llm: LLM) -> None:
    llm.frontend.eos_token_ids = list(range(100))
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    (output,) = llm.beam_search([{"prompt_token_ids": [5, 6, 7]}], params)
    assert [item.tokens for item in output.sequences] == [[5, 6, 7]] * 2
    assert [item.finish_reason for item in output.sequences] == ["stop"] * 2
    assert len({item.stop_reason for item in output.sequences}) == 2


def test_a_search_is_counted_by_its_completions(tiny_llama: str) -> None:
    llm = open_llm(tiny_llama, max_model_len=64, disable_log_stats=False)
    params = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True)
    llm.beam_search([{"prompt_token_ids": [5, 6]}, {"prompt_token_ids": [7]}], params)
    found: dict[str, float] = {}
    for each in llm.get_metrics():
        count = each.count if isinstance(each, Histogram) else getattr(each, "value", 0)
        found[each.name] = found.get(each.name, 0) + count
    assert found["penstock:request_success"] == 2 * 3
    assert found["penstock:e2e_request_latency_seconds"] == 2 * 3
    assert found["penstock:time_to_first_token_seconds"] == 2 * 3
    assert found["penstock:request_params_n"] == 2
    assert found["penstock:generation_tokens"] == 2 * (1 + 3 * 3), "the tokens of all steps"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (EngineDeadError("gone"), FinishReason.ERROR),
        (asyncio.CancelledError(), FinishReason.ABORT),
    ],
)
def test_a_search_that_is_cut_short_is_reported(
    llm: LLM, error: BaseException, reason: FinishReason
) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, n=2)
    request = llm.frontend.prepare("mine", [5, 6, 7], params)
    request = dataclasses.replace(request, beams=BeamSearchParams(beam_width=2, max_tokens=4))

    async def run(
        requests: Sequence[PreparedRequest],
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        assert all(child.is_search_step for each in requests for child in each.children)
        raise error
        yield

    told: list[RequestRecord] = []
    with pytest.raises(type(error)):
        asyncio.run(beam_outputs([request], run, map(str, itertools.count()), told.extend))
    assert [record.request_id for record in told] == ["mine#0", "mine#1"]
    assert {record.finish_reason for record in told} == {reason}
    assert not any(record.request.is_search_step or record.token_ids for record in told)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_width": 0}, "beam_width must be at least 1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"temperature": 0.5}, "temperature must be 0 with beam search"),
        ({"length_penalty": float("nan")}, "length_penalty must be a finite number"),
    ],
)
def test_wrong_parameters_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **options})
