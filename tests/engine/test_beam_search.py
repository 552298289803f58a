"""Beam search chooses the sequences that transformers chooses."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tiny_engine import open_llm
from transformers import AutoModelForCausalLM

from penstock import LLM, BeamSearchParams
from penstock.protocol.errors import InputError

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
