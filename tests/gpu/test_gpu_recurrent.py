"""Models with recurrent layers on a GPU: the CPU's tokens, with graphs and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import Oracle
from gpu_runs import PROMPTS, SETTINGS, as_inputs, run, sampling, tokens
from test_gpu_engine import run_without_waiting
from tiny_models import make_checkpoint

from penstock.llm import LLM

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GREEDY = sampling()


@pytest.fixture(scope="module", params=["mamba2", "falcon_h1", "qwen3_next"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param)


def test_greedy_tokens_are_the_cpus(checkpoint: Path) -> None:
    expected = tokens(run(checkpoint, GREEDY, device="cpu"))
    ways: list[dict[str, Any]] = [
        {}, {"enforce_eager": True}, {"max_num_batched_tokens": 48}, {"max_num_seqs": 2}
    ]  # fmt: skip
    for options in ways:
        assert tokens(run(checkpoint, GREEDY, device="cuda", **options)) == expected, options


def test_no_step_of_a_steady_state_waits_for_the_device(checkpoint: Path) -> None:
    with LLM(str(checkpoint), **SETTINGS, dtype="float32", device="cuda") as llm:
        params = [GREEDY] * len(PROMPTS)
        for _ in range(3):  # kernels are compiled, graphs captured, prefixes cached
            expected = tokens(llm.generate(as_inputs(PROMPTS), params, use_tqdm=False))
        assert run_without_waiting(llm, params) == expected
        runner = llm.engine.executor.worker.runner  # type: ignore[attr-defined]
        captured = runner.steps._captured
        assert captured
        assert all(bucket.decode for bucket in captured)


def test_in_bfloat16_graphs_change_nothing(checkpoint: Path) -> None:
    options = {"device": "cuda", "dtype": "bfloat16"}
    captured = tokens(run(checkpoint, GREEDY, **options))
    assert tokens(run(checkpoint, GREEDY, enforce_eager=True, **options)) == captured


@pytest.mark.parametrize(
    "options",
    [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 48}, {"block_size": 4}],
    ids=str,
)
def test_drafts_change_no_token_and_leave_the_states_of_those_that_hold(
    checkpoint: Path, options: dict[str, Any]
) -> None:
    expected = tokens(run(checkpoint, GREEDY, device="cuda"))
    texts = [[*prompt, *found] for prompt, found in zip(PROMPTS, expected, strict=True)]
    continued = tokens(run(checkpoint, GREEDY, [text[:-1] for text in texts], device="cuda"))
    oracle = Oracle(texts, wrong=3, num_drafts=4)
    settings = {**SETTINGS, "dtype": "float32", "device": "cuda", **options}
    with LLM(str(checkpoint), drafter=oracle, **settings) as llm:
        for _ in range(3):
            assert tokens(llm.generate(as_inputs(PROMPTS), GREEDY, use_tqdm=False)) == expected
        assert oracle.num_accepted > 60
        inputs = as_inputs([text[:-1] for text in texts])  # from states in the prefix cache
        assert tokens(llm.generate(inputs, GREEDY, use_tqdm=False)) == continued
        steps = llm.engine.executor.worker.runner.steps  # type: ignore[attr-defined]
        assert bool(steps._replays) != options.get("enforce_eager", False)


def test_a_draft_model_with_recurrent_layers_is_right_about_itself(checkpoint: Path) -> None:
    expected = tokens(run(checkpoint, GREEDY, device="cuda"))
    drafts = {"method": "draft_model", "model": str(checkpoint), "num_speculative_tokens": 3}
    drafts |= {"adaptive": False}
    settings = {**SETTINGS, "dtype": "float32", "device": "cuda", "speculative_config": drafts}
    with LLM(str(checkpoint), **settings) as llm:
        for _ in range(3):
            assert tokens(llm.generate(as_inputs(PROMPTS), GREEDY, use_tqdm=False)) == expected
        found = llm.engine.scheduler.speculation.stats()
    assert found.num_accepted_tokens > 0.8 * found.num_draft_tokens > 50


def test_n_gram_drafts_of_a_steady_state_do_not_wait_for_the_device(checkpoint: Path) -> None:
    drafts = {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}
    settings = {**SETTINGS, "dtype": "float32", "device": "cuda", "speculative_config": drafts}
    with LLM(str(checkpoint), **settings, async_scheduling=True) as llm:
        params = [GREEDY] * len(PROMPTS)
        for _ in range(4):
            expected = tokens(llm.generate(as_inputs(PROMPTS), params, use_tqdm=False))
        assert run_without_waiting(llm, params) == expected
