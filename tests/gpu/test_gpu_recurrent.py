"""Models with recurrent layers on a GPU: the CPU's tokens, with graphs and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
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
