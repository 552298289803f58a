"""Speculation with the C++ path on the real default model: the same bits, in fewer steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from eagle_heads import make_eagle, make_head
from medusa_heads import make_heads

from penstock import LLM, SamplingParams, StructuredOutputsParams
from penstock.protocol.outputs import RequestOutput

TEXT = Path(__file__).parents[2].joinpath("LICENSE").read_text()[600:1400]
PROMPTS = [
    f"Repeat this text:\n\n{TEXT}\n\nHere it is again:\n\n{TEXT[:150]}",
    "The capital of France is",
    "1 2 3 4 1 2 3 4 1 2 3",
]
OPTIONS: dict[str, Any] = {"max_model_len": 1024, "log_level": "warning"}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.6, "seed": 7, "top_p": 0.9},
    "several": {"temperature": 0.8, "seed": 3, "n": 2},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "stop": {"temperature": 0.0, "stop": [" the", "4"]},
    "grammar": {
        "temperature": 0.0,
        "structured_outputs": StructuredOutputsParams(regex="([a-z]{3} ){4}!"),
    },
}
PARAMS = [SamplingParams(max_tokens=24, logprobs=2, **kind) for kind in KINDS.values()]
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "adaptive": False},
    "suffix": {"method": "suffix", "adaptive": False},
    "random": {"method": "custom", "model": "drafters:AtRandom", "adaptive": False},
}


SIZES = {  # of the default model, for heads
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "vocab_size": 49152,
}
HEADS: dict[str, Callable[[Path, Path], Path]] = {
    "eagle": make_eagle,
    "eagle3": lambda folder, target: make_head(folder, target, max_position_embeddings=1024)[0],
    "medusa": make_heads,
}


def bits(outputs: list[RequestOutput]) -> list[Any]:
    """Tokens, texts and the exact logprobs."""
    return [
        (list(choice.token_ids), choice.text, choice.finish_reason, choice.logprobs)
        for output in outputs
        for choice in output.outputs
    ]


def num_accepted(outputs: list[RequestOutput]) -> int:
    drafts = [choice.drafts for output in outputs for choice in output.outputs]
    return sum(own.num_accepted_tokens for own in drafts if own is not None)


def run(llm: LLM) -> list[RequestOutput]:
    prompts = [prompt for _ in PARAMS for prompt in PROMPTS]
    params = [own for own in PARAMS for _ in PROMPTS]
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.fixture(scope="module")
def expected(default_model: str) -> Iterator[list[Any]]:
    with LLM(default_model, **OPTIONS) as llm:
        yield bits(run(llm))


@pytest.mark.parametrize(
    "method", ["ngram", "suffix", pytest.param("random", marks=pytest.mark.slow)]
)
def test_every_kind_of_request_gives_the_same_bits(
    default_model: str, expected: list[Any], method: str
) -> None:
    with LLM(default_model, speculative_config=METHODS[method], **OPTIONS) as llm:
        outputs = run(llm)
    assert bits(outputs) == expected
    assert method == "random" or num_accepted(outputs) > 20


def test_drafts_from_a_past_output_give_the_same_bits(
    default_model: str, expected: list[Any]
) -> None:
    with LLM(default_model, speculative_config=METHODS["suffix"], **OPTIONS) as llm:
        run(llm)
        outputs = run(llm)
    assert bits(outputs) == expected
    assert num_accepted(outputs) > 100


@pytest.mark.slow
@pytest.mark.parametrize("method", ["draft_model", *HEADS])
def test_drafts_of_models_and_heads_give_the_same_bits(
    default_model: str, expected: list[Any], method: str, tmp_path: Path
) -> None:
    """Random heads, whose drafts are nearly all rejected."""
    sizes, model = tmp_path / "sizes", default_model
    sizes.mkdir()
    (sizes / "config.json").write_text(json.dumps(SIZES))
    if method in HEADS:
        model = str(HEADS[method](tmp_path / "head", sizes))
    config = {"method": method, "model": model, "num_speculative_tokens": 3, "adaptive": False}
    with LLM(default_model, speculative_config=config, **OPTIONS) as llm:
        assert bits(run(llm)) == expected
        assert llm.engine.speculation_stats().num_draft_tokens > 100
