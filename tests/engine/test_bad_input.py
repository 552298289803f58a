"""Bad requests get an error that says what to do, and harm nobody else."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_engine import OPTIONS
from tiny_models import make_checkpoint

from penstock import LLM, SamplingParams
from penstock.protocol.errors import EngineDeadError, InputError
from penstock.protocol.step import StepPlan
from penstock.runner.logits_processors import LogitsProcessor, ProcessorRows
from penstock.runner.runner import StepHandle

GOOD = {"prompt_token_ids": [1, 2, 3]}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_llama: str) -> LLM:
    return LLM(tiny_llama, max_model_len=64, **OPTIONS)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt_token_ids": []}, "prompt must contain at least one token"),
        ({"prompt_token_ids": [1] * 64}, r"context length is 64 tokens.*65 tokens \(64 in"),
        ({"prompt_token_ids": [1, 256]}, "token ids from 0 to 255, got 256"),
        ({"prompt_token_ids": [-1]}, "token ids from 0 to 255, got -1"),
        ({"prompt_token_ids": ["a"]}, "token ids from 0 to 255, got 'a'"),
        ("text", "prompt must be token ids, since skip_tokenizer_init is set"),
        ({"tokens": [1]}, "may contain prompt, prompt_token_ids, cache_salt, .*, got 'tokens'"),
        ({}, "a prompt must be a text"),
        ({"prompt_token_ids": [True]}, "token ids from 0 to 255, got True"),
        ({"prompt_token_ids": [1], "cache_salt": 5}, "cache_salt must be a string, got 5"),
        ({**GOOD, "cache_salt": "x" * 1025}, "cache_salt may have at most 1024 characters"),
        ({**GOOD, "multi_modal_data": {"image": 1}}, "data.image must be an image .* got int"),
        (7, "a prompt must be a text"),
        (None, "a prompt must be a text"),
    ],
)
def test_bad_prompts_are_refused_and_the_engine_goes_on(
    llm: LLM, prompt: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        llm.generate([GOOD, prompt], GREEDY, use_tqdm=False)
    assert len(llm.generate(GOOD, GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 4
    assert llm.engine.stats().kv_cache_usage == 0.0


@pytest.mark.parametrize("prompts", [None, 7])
def test_what_is_no_prompt_at_all_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InputError, match="a prompt must be a text"):
        llm.generate(prompts, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("params", ["greedy", 7, {"temperature": 0}, [GREEDY, None]])
def test_what_is_no_sampling_params_is_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(InputError, match="sampling_params must be SamplingParams, or a list"):
        llm.generate([GOOD, GOOD], params, use_tqdm=False)


@pytest.mark.parametrize(
    ("priority", "message"),
    [
        ([1, "high"], "priority must be an integer, got 'high'"),
        ([None, 1], "priority must be an integer, got None"),
        ([1, 10**30], "priority must be at most"),
        ([1], r"priority must be a list with one number per prompt \(2\), got \[1\]"),
        (1, "priority must be a list with one number per prompt"),
    ],
)
def test_a_priority_that_cannot_be_ranked_is_refused_before_it_harms_others(
    tiny_llama: str, priority: Any, message: str
) -> None:
    with LLM(tiny_llama, scheduling_policy="priority", **OPTIONS) as llm:
        with pytest.raises(InputError, match=message):
            llm.generate([GOOD, GOOD], GREEDY, use_tqdm=False, priority=priority)
        assert len(llm.generate([GOOD] * 2, GREEDY, use_tqdm=False, priority=[2, 1])) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature must be at least 0 and at most 100, got -1"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1, got 0"),
        ({"top_k": -2}, "top_k must be at least -1, got -2"),
        ({"min_p": 2}, "min_p must be at least 0 and at most 1, got 2"),
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"n": 10**9}, "n must be at most 128"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"min_tokens": 20, "max_tokens": 5}, r"min_tokens must be at most max_tokens \(5\)"),
        ({"repetition_penalty": 0}, "repetition_penalty must be at least 0.01"),
        ({"seed": 2**64}, "seed must be at most"),
        ({"stop": ""}, "stop must contain non-empty strings"),
        ({"allowed_token_ids": []}, "allowed_token_ids must not be empty"),
        ({"logit_bias": {1: 1000.0}}, "logit_bias must be at least -100 and at most 100"),
        ({"max_tokens": "many"}, "max_tokens must be an integer, got 'many'"),
        ({"max_tokens": 10**5000}, "max_tokens must be at most .* an integer of 16610 bits"),
        ({"temperature": 10**400}, "temperature must be at least 0 and at most 100"),
        ({"stop": 5}, "stop must be a list, got 5"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list, got 5"),
        ({"stop_token_ids": "12"}, "stop_token_ids must be a list, got '12'"),
        ({"allowed_token_ids": 5}, "allowed_token_ids must be a list, got 5"),
        ({"logit_bias": [1]}, r"logit_bias must map token ids to numbers, got \[1\]"),
        ({"stop": ["x" * 5000]}, "stop must contain non-empty strings of at most 4096 characters"),
        ({"stop": ["x"] * 65}, "stop may contain at most 64 strings, got 65"),
        ({"bad_words": ["x"] * 1025}, "bad_words may contain at most 1024 strings, got 1025"),
        ({"bad_words": ["x" * 5000]}, "bad_words must contain non-empty strings of at most 4096"),
        (
            {"stop": ["x" * 4096] * 9},
            "stop may be at most 32768 characters long together, got 36864",
        ),
        (
            {"bad_words": ["x" * 4096] * 9},
            "bad_words may be at most 32768 characters long together",
        ),
        ({"extra_args": 5}, "extra_args must be a dict, got 5"),
        ({"bad_words": "foo"}, "bad_words must be a list, got 'foo'"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False, got 'no'"),
        ({"output_kind": 1}, "output_kind must be a RequestOutputKind, got 1"),
    ],
)
def test_absurd_parameters_are_refused_where_they_are_made(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        SamplingParams(**options)
    assert caught.value.field == next(iter(options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logprobs": 21}, r"logprobs must be from 0 to 20 \(the engine's max_logprobs\), got 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be from 0 to 20"),
        ({"stop_token_ids": [999]}, "stop_token_ids must contain token ids from 0 to 255, got 999"),
        ({"allowed_token_ids": [999]}, "allowed_token_ids must contain token ids"),
        ({"logit_bias": {999: 1.0}}, "logit_bias must contain token ids"),
        ({"stop": ["x"]}, "stop needs a tokenizer"),
        ({"bad_words": ["x"]}, "bad_words needs a tokenizer"),
    ],
)
def test_parameters_that_this_model_cannot_do_are_refused(
    llm: LLM, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        llm.generate(GOOD, SamplingParams(**options), use_tqdm=False)


def test_a_max_tokens_past_the_context_ends_at_the_context(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=10_000, ignore_eos=True)
    (output,) = llm.generate(GOOD, params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 64 - 3
    assert output.outputs[0].finish_reason == "length"


def test_a_request_whose_logits_are_not_numbers_fails_alone(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][77] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    poisoned = {"prompt_token_ids": [5, 77, 6]}
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logit_bias={77: -100.0})
    with LLM(str(folder), max_model_len=64, num_gpu_blocks_override=8, **OPTIONS) as llm:
        (expected,) = llm.generate(GOOD, params, use_tqdm=False)
        outputs = llm.generate([GOOD, poisoned, poisoned, GOOD], params, use_tqdm=False)
        for output in outputs[1:3]:
            assert output.outputs[0].finish_reason == "error"
            assert output.error is not None
            assert "NaN" in output.error
        # The blocks that held the poison are used again, and nobody notices.
        again = llm.generate([GOOD] * 6, params, use_tqdm=False)
        for output in (outputs[0], outputs[3], *again):
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids


class Explosive(LogitsProcessor):
    """Fails for requests that ask for it, and bans a token for the others that name one."""

    needs_tokens = True

    def __init__(self) -> None:
        self.arguments: dict[int, dict[str, Any]] = {}

    def add(self, slot: int, request: Any) -> bool:
        self.arguments[slot] = request.params.extra_args or {}
        return bool(self.arguments[slot])

    def apply(self, logits: torch.Tensor, rows: ProcessorRows) -> torch.Tensor:
        assert rows.token_ids is not None
        for row, slot in enumerate(rows.host_slots.tolist()):
            if "explode" in self.arguments[slot]:
                raise RuntimeError("boom")
            assert rows.token_ids[row][:3] == [1, 2, 3]
            logits[row, self.arguments[slot]["ban"]] = -torch.inf
        return logits


def test_a_raising_logits_processor_fails_its_request_alone(tiny_llama: str) -> None:
    with LLM(tiny_llama, logits_processors=[Explosive], async_scheduling=True, **OPTIONS) as llm:
        assert llm.engine.limits.max_in_flight == 1, "it needs the tokens so far"
        (free,) = llm.generate(GOOD, GREEDY, use_tqdm=False)
        first = free.outputs[0].token_ids[0]
        kinds: list[dict[str, Any] | None] = [None, {"explode": 1}, {"ban": first}]
        params = [
            SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, extra_args=arguments)
            for arguments in kinds
        ]
        untouched, exploded, banned = llm.generate([GOOD] * 3, params, use_tqdm=False)
    assert untouched.outputs[0].token_ids == free.outputs[0].token_ids
    assert exploded.outputs[0].finish_reason == "error"
    assert "boom" in (exploded.error or "")
    assert first not in banned.outputs[0].token_ids


def test_a_step_that_fails_ends_its_requests_and_the_engine_goes_on(
    tiny_llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(tiny_llama, async_scheduling=True, **OPTIONS) as llm:
        (expected,) = llm.generate(GOOD, GREEDY, use_tqdm=False)
        launch = llm.engine.executor.runner.launch

        def fail_at_third(plan: StepPlan) -> StepHandle:
            if plan.step_id == failing:
                raise MemoryError("no more")
            return launch(plan)  # type: ignore[no-any-return]

        failing = llm.engine.scheduler._last_step_id + 3
        monkeypatch.setattr(llm.engine.executor.runner, "launch", fail_at_third)
        (failed,) = llm.generate(GOOD, GREEDY, use_tqdm=False)
        assert failed.outputs[0].finish_reason == "error"
        assert "no more" not in (failed.error or ""), "internals go to the log"
        assert llm.engine.stats().kv_cache_usage == 0.0
        (again,) = llm.generate(GOOD, GREEDY, use_tqdm=False)
        assert again.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize("method", ["launch", "sample", "collect"])
def test_an_interrupt_in_the_middle_of_a_step_leaves_the_engine_usable(
    tiny_llama: str, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    with LLM(tiny_llama, async_scheduling=True, **OPTIONS) as llm:
        (expected,) = llm.generate(GOOD, GREEDY, use_tqdm=False)
        original = getattr(llm.engine.executor.runner, method)
        calls = []

        def interrupted(*args: Any) -> Any:
            calls.append(method)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return original(*args)

        monkeypatch.setattr(llm.engine.executor.runner, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([GOOD, GOOD], GREEDY, use_tqdm=False)
        assert not llm.engine.has_work()
        assert llm.engine.stats().num_steps_in_flight == 0
        assert llm.engine.stats().kv_cache_usage == 0.0
        (again,) = llm.generate(GOOD, GREEDY, use_tqdm=False)
        assert again.outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_request_that_forbids_every_token_fails_alone_and_says_why(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, min_tokens=4, stop_token_ids=[7], allowed_token_ids=[7])
    failed, good = llm.generate([GOOD, GOOD], [params, GREEDY], use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error"
    assert failed.error_field == "allowed_token_ids"
    assert "not forbidden by min_tokens" in (failed.error or "")
    assert good.outputs[0].finish_reason == "length"


def test_a_closed_engine_gives_its_memory_back_and_refuses_requests(tiny_llama: str) -> None:
    llm = LLM(tiny_llama, **OPTIONS)
    stream = llm.stream(GOOD, GREEDY)
    next(stream)
    model = weakref.ref(llm.engine.executor.worker.model)
    llm.close()
    llm.close()
    gc.collect()
    assert model() is None
    for run in (lambda: llm.generate(GOOD, GREEDY, use_tqdm=False), lambda: next(stream)):
        with pytest.raises(EngineDeadError, match="the engine is closed"):
            run()
