"""Speculation by configuration: the tokens and logprobs are those without it."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from drafters import AtRandom
from sampling_kinds import KINDS
from tiny_engine import open_llm, tokens_and_logprobs

from penstock import LLM, SamplingParams
from penstock.executor.in_process import InProcessExecutor
from penstock.protocol.errors import ConfigError

# Without `adaptive`, drafts do not depend on measured times.
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False},
    "suffix": {"method": "suffix", "suffix_decoding_min_token_prob": 0.01, "adaptive": False},
    "random": {"method": "custom", "model": "drafters:AtRandom", "adaptive": False},
}
BY_SLOT = ("_followed", "_entered", "_indexes", "_requests", "_texts")


def prompts() -> list[dict[str, Any]]:
    """Texts that repeat themselves, so that something is found in them."""
    rng = random.Random(3)
    words = [[rng.randrange(256) for _ in range(rng.randrange(1, 5))] for _ in range(6)]
    chosen = [rng.choices(words, k=count) for count in (1, 6, 14, 30)]
    return [{"prompt_token_ids": [*itertools.chain(*text)]} for text in chosen]


def run(llm: LLM) -> list[Any]:
    kinds = [SamplingParams(max_tokens=32, logprobs=2, **kind) for kind in KINDS.values()]
    return [tokens_and_logprobs(llm, prompts(), params) for params in kinds]


def num_steps(llm: LLM) -> int:
    assert isinstance(llm.engine.executor, InProcessExecutor)
    return llm.engine.scheduler._last_step_id


@pytest.fixture(scope="module")
def expected(tiny_llama: str) -> list[Any]:
    with open_llm(tiny_llama, enable_prefix_caching=False) as llm:
        return run(llm)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True},
        {"max_num_batched_tokens": 5},
        {"num_gpu_blocks_override": 14, "max_model_len": 128},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["plain", "overlapping", "in chunks", "preempted", "two ranks"],
)
def test_tokens_and_logprobs_are_those_without_speculation(
    tiny_llama: str, expected: list[Any], method: str, options: dict[str, Any]
) -> None:
    with open_llm(tiny_llama, speculative_config=METHODS[method], **options) as llm:
        found = [run(llm), run(llm)]  # the second time with a warm prefix cache
        assert llm.engine.stats().kv_cache_usage == 0.0
        if "num_gpu_blocks_override" in options:
            assert llm.engine.stats().num_preemptions > 0
    for results in found:
        for ours, theirs in zip(results, expected, strict=True):
            assert_equal(ours, theirs, exact="tensor_parallel_size" not in options)


def assert_equal(ours: list[Any], theirs: list[Any], exact: bool) -> None:
    for (tokens, logprobs), (expected, values) in zip(ours, theirs, strict=True):
        assert tokens == expected
        for own, other in zip(logprobs, values, strict=True):
            assert own == (other if exact else pytest.approx(other, abs=1e-4))


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_text_that_repeats_itself_takes_fewer_steps(tiny_llama: str, method: str) -> None:
    """One token is biased so much that it follows itself."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logit_bias={7: 100.0})
    steps = []
    for config in (None, {**METHODS[method], "num_speculative_tokens": 4}):
        with open_llm(tiny_llama, speculative_config=config) as llm:
            (output,) = llm.generate(prompts()[0], params, use_tqdm=False)
            assert output.outputs[0].token_ids == [7] * 40
            steps.append(num_steps(llm))
    assert steps[0] == 40
    assert steps[1] <= 14


def test_suffix_drafts_repeat_what_a_past_request_gave(tiny_llama: str) -> None:
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=40, ignore_eos=True)
    with open_llm(tiny_llama, speculative_config=METHODS["suffix"]) as llm:
        steps, outputs = [], []
        for _ in range(2):
            before = num_steps(llm)
            (output,) = llm.generate(prompts()[1], params, use_tqdm=False)
            outputs.append(output.outputs[0].token_ids)
            steps.append(num_steps(llm) - before)
    assert outputs[0] == outputs[1]
    assert steps[1] < steps[0] / 2


def test_a_request_without_a_match_brings_no_drafts(tiny_llama: str) -> None:
    config = {**METHODS["ngram"], "prompt_lookup_min": 32}
    with open_llm(tiny_llama, speculative_config=config) as llm:
        before = llm.engine.scheduler.num_scheduled_tokens
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        llm.generate({"prompt_token_ids": list(range(20))}, params, use_tqdm=False)
        assert llm.engine.scheduler.num_scheduled_tokens - before == 20 + 11


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_request_may_do_without(tiny_llama: str, method: str) -> None:
    with open_llm(tiny_llama, speculative_config=METHODS[method]) as llm:
        before = llm.engine.scheduler.num_scheduled_tokens
        bias = {7: 100.0}
        params = [
            SamplingParams(
                temperature=0, max_tokens=12, ignore_eos=True, logit_bias=bias, speculative=own
            )
            for own in (False, True)
        ]
        llm.generate([prompts()[0]] * 2, params[:1] * 2, use_tqdm=False)
        num_prompt = len(prompts()[0]["prompt_token_ids"])
        assert llm.engine.scheduler.num_scheduled_tokens - before == 2 * (num_prompt + 11)
        both = llm.generate([prompts()[0]] * 2, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in both] == [[7] * 12] * 2
        assert [output.outputs[0].drafts is None for output in both] == [True, False]


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_nothing_is_kept_of_requests_that_left(tiny_llama: str, method: str) -> None:
    with open_llm(tiny_llama, speculative_config=METHODS[method]) as llm:
        run(llm)
        llm.generate(prompts()[0], SamplingParams(max_tokens=2), use_tqdm=False)
        assert isinstance(llm.engine.executor, InProcessExecutor)
        drafter: Any = llm.engine.executor.worker.drafter
        by_slot = [value for name, value in vars(drafter).items() if name in BY_SLOT]
        assert len(by_slot) >= 3
        assert all(len(value) <= 1 for value in by_slot)  # the last one, until the next plan


def test_a_pooling_model_refuses_it(tiny_llama: str) -> None:
    with pytest.raises(ConfigError, match="speculative_config is for models that generate text"):
        open_llm(tiny_llama, runner="pooling", speculative_config={"method": "ngram"})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("Drafter", 'model must be "module:Class", got "Drafter"'),
        ("no.such:Drafter", "cannot import no.such"),
        ("penstock.runner.drafter:Drift", "penstock.runner.drafter has no Drift"),
        ("penstock.runner.drafter:Drafts", "must be a subclass of penstock.runner.drafter.Drafter"),
        ("penstock.runner.drafters.custom:CustomDrafter", r"\(3\) cannot be constructed"),
    ],
)
def test_a_class_that_is_no_drafter_is_refused(tiny_llama: str, model: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_llm(tiny_llama, speculative_config={"method": "custom", "model": model})


def test_a_drafter_and_a_configuration_exclude_each_other(tiny_llama: str) -> None:
    with pytest.raises(ConfigError, match="drafter and speculative_config cannot be combined"):
        open_llm(tiny_llama, drafter=AtRandom(2), speculative_config={"method": "ngram"})


def test_two_ranks_want_a_drafter_by_its_name(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match='"method": "custom", "model": "module:Class"'):
        open_llm(tiny_llama, drafter=AtRandom(2), tensor_parallel_size=2)
