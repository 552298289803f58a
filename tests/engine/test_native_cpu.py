"""The C++ path on the real default model: the same bits however a request is run, and quality."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_engine import tokens_and_logprobs

from penstock import LLM, SamplingParams

TEXT = Path(__file__).parents[2].joinpath("LICENSE").read_text()
PROMPTS = [TEXT[:900], "The capital of France is", TEXT[2000:2600], "1 2 3 4", TEXT[5000:5900]]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=4)
OPTIONS: dict[str, Any] = {"max_model_len": 1024, "log_level": "warning"}


@pytest.fixture(scope="module")
def llm(default_model: str) -> Iterator[LLM]:
    with LLM(default_model, enable_prefix_caching=False, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[Any]:
    """What the prompts give together."""
    return bits(llm, PROMPTS)


@pytest.fixture(scope="module")
def floats(default_model: str) -> Iterator[LLM]:
    """The model with its weights unpacked."""
    with LLM(default_model, gguf_compute="dequantize", cpu_threads=1, **OPTIONS) as llm:
        yield llm


def bits(llm: LLM, prompts: list[Any], params: SamplingParams = PARAMS) -> list[Any]:
    """What each prompt gives: its tokens, and the exact log-probabilities of the likeliest."""
    return tokens_and_logprobs(llm, prompts, params)


def prompt_logprobs(llm: LLM, token_ids: list[int]) -> list[float]:
    """The log-probability of each token but the first, given those before it."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": token_ids}], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    rows = zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)
    return [row[token].logprob for row, token in rows if row is not None]


def test_a_request_gives_the_same_bits_alone_and_in_a_batch(llm: LLM, expected: list[Any]) -> None:
    assert [bits(llm, [prompt])[0] for prompt in PROMPTS] == expected
    assert bits(llm, PROMPTS[::-1]) == expected[::-1]


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_prompt_gives_the_same_bits_in_chunks(
    default_model: str, expected: list[Any], chunk: int
) -> None:
    options = {**OPTIONS, "long_prefill_token_threshold": chunk}
    with LLM(default_model, enable_prefix_caching=False, **options) as chunked:
        assert bits(chunked, PROMPTS) == expected


def test_decoded_tokens_give_the_same_bits_when_prefilled(llm: LLM) -> None:
    prompt = llm.get_tokenizer().encode(PROMPTS[0])
    ((tokens, rows),) = bits(llm, [{"prompt_token_ids": prompt}])
    decoded = [row[token] for row, token in zip(rows, tokens, strict=True)]
    assert prompt_logprobs(llm, prompt + tokens)[len(prompt) - 1 :] == decoded


def test_layers_in_one_call_give_the_same_bits_as_their_parts(
    default_model: str, expected: list[Any]
) -> None:
    with LLM(default_model, enable_prefix_caching=False, **OPTIONS) as parts:
        model: Any = parts.engine.executor.worker.model  # type: ignore[attr-defined]
        for layer in model.model.layers:
            assert layer.fused is not None
            layer.fused = None
        assert bits(parts, PROMPTS) == expected


def test_perplexity_is_that_of_the_floats_within_one_percent(llm: LLM, floats: LLM) -> None:
    token_ids = llm.get_tokenizer().encode(TEXT)[:700]

    def perplexity(logprobs: list[float]) -> float:
        return math.exp(-sum(logprobs) / len(logprobs))

    expected = perplexity(prompt_logprobs(floats, token_ids))
    assert perplexity(prompt_logprobs(llm, token_ids)) == pytest.approx(expected, rel=0.01)


def test_plain_torch_gives_nearly_the_same(floats: LLM, default_model: str) -> None:
    token_ids = floats.get_tokenizer().encode(TEXT)[:200]
    expected = prompt_logprobs(floats, token_ids)
    with LLM(default_model, cpu_backend="torch", cpu_threads=1, **OPTIONS) as plain:
        assert prompt_logprobs(plain, token_ids) == pytest.approx(expected, abs=2e-3)
