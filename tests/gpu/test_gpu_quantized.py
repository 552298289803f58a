"""Quantized weights and caches on a GPU, through the whole engine: as near to the floats that they
stand for as the reference on a CPU is, and the same with graphs and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_runs import prompt_logprobs, run, sampling, tokens
from tiny_models import make_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ON_CPU = {"device": "cpu", "cpu_backend": "torch"}
OPTIONS: list[dict[str, Any]] = [
    {"quantization": "fp8"},
    {"quantization": "fp8_per_block"},
    {"quantization": "fp8_per_tensor"},
    {"kv_cache_dtype": "fp8"},
    {"quantization": "fp8", "kv_cache_dtype": "fp8"},
]


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param)


@pytest.mark.parametrize("options", OPTIONS)
def test_logits_are_as_near_to_those_of_floats_as_the_references(
    checkpoint: Path, options: dict[str, Any]
) -> None:
    exact = prompt_logprobs(checkpoint, **ON_CPU)
    theirs = (prompt_logprobs(checkpoint, **ON_CPU, **options) - exact).abs()
    ours = (prompt_logprobs(checkpoint, device="cuda", **options) - exact).abs()
    assert 0.0 < float(ours.mean()) < 1.3 * float(theirs.mean())


@pytest.mark.parametrize("options", OPTIONS)
def test_graphs_change_no_token(checkpoint: Path, options: dict[str, Any]) -> None:
    graphs, eager = (
        tokens(run(checkpoint, sampling(), device="cuda", enforce_eager=eager, **options))
        for eager in (False, True)
    )
    assert graphs == eager
