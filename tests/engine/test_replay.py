"""A request that carries output tokens goes on exactly as the original would have."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tiny_engine import open_llm, prepare_replay

from penstock import LLM, SamplingParams
from penstock.protocol.errors import InputError

PROMPT = [5, 6, 7, 8, 9, 10, 11]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "seed": 4, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 0.9, "seed": 5, "min_tokens": 12, "stop_token_ids": list(range(0, 256, 3))},
    {"temperature": 0.9, "seed": 6, "logprobs": 2},
]


@pytest.fixture(scope="module")
def llm(tiny_llama: str) -> LLM:
    return open_llm(tiny_llama)


def finish(llm: LLM, params: SamplingParams, output: list[int]) -> Any:
    request = prepare_replay(llm, PROMPT, params, output)
    return llm._run([request], use_tqdm=False)[0].outputs[0]


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_replay_goes_on_as_the_original(llm: LLM, options: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=20, **options)
    whole = finish(llm, params, [])
    assert len(whole.token_ids) > 5
    for cut in range(1, len(whole.token_ids), 3):
        replayed = finish(llm, params, whole.token_ids[:cut])
        assert replayed.token_ids == whole.token_ids
        assert replayed.finish_reason == whole.finish_reason
        assert replayed.stop_reason == whole.stop_reason
        if params.logprobs is not None:  # those of replayed tokens stay with the client
            for ours, original in zip(replayed.logprobs, whole.logprobs[cut:], strict=True):
                assert ours.keys() == original.keys()
                for token, entry in original.items():
                    assert ours[token].logprob == pytest.approx(entry.logprob, abs=1e-5)
                    assert ours[token].rank == entry.rank


def test_a_replay_with_nothing_left_to_generate_is_refused(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, temperature=0)
    with pytest.raises(InputError, match="output_token_ids must leave at least 1 token"):
        finish(llm, params, [1, 2, 3, 4])
    assert finish(llm, params, []).finish_reason == "length"


def test_the_order_of_arrival_survives_a_clock_that_is_set_back(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrivals = []
    for now in (1e9, 5e8, 2e9, 0.0):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        (child,) = llm.frontend.prepare("r", PROMPT, SamplingParams()).children
        arrivals.append(child.arrival_time)
    assert arrivals == sorted(arrivals)


def test_a_stop_text_that_straddles_the_cut_is_found(default_model: str) -> None:
    with LLM(default_model, gguf_compute="dequantize", max_model_len=256, cpu_threads=1) as llm:
        prompt = llm.get_tokenizer().encode("1 2 3 4 5 6 7")
        params = SamplingParams(temperature=0, max_tokens=24, stop=["9 10 1"])

        def run(output: list[int]) -> Any:
            request = prepare_replay(llm, prompt, params, output)
            return llm._run([request], use_tqdm=False)[0].outputs[0]

        whole = run([])
        assert whole.stop_reason == "9 10 1"
        for cut in range(1, len(whole.token_ids)):
            replayed = run(whole.token_ids[:cut])
            assert replayed.text == whole.text
            assert replayed.token_ids == whole.token_ids
            assert replayed.stop_reason == whole.stop_reason
