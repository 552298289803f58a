"""GGUF files on a GPU, in their blocks through the whole engine: what their floats give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_builder import write_gguf
from gpu_runs import SETTINGS, prompt_logprobs, run, sampling, tokens

from penstock.executor.in_process import InProcessExecutor
from penstock.llm import LLM

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PROMPTS = [[1 + (index * step) % 38 for index in range(length)] for step, length in
           ((1, 3), (3, 40), (7, 110), (11, 17), (5, 64), (13, 1))]  # fmt: skip
OPTIONS: dict[str, Any] = {"device": "cuda", "max_model_len": 128, "prompts": PROMPTS}
MODELS = {
    "llama, Q4_K, tied": ("llama", "Q4_K", True),
    "qwen2, Q6_K": ("qwen2", "Q6_K", False),
    "qwen3, Q5_0": ("qwen3", "Q5_0", False),
    "llama, IQ4_XS": ("llama", "IQ4_XS", False),
    "llama, IQ2_XXS, tied": ("llama", "IQ2_XXS", True),
    "qwen3, IQ3_S": ("qwen3", "IQ3_S", False),
}


@pytest.fixture(scope="module", params=list(MODELS))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    arch, type_name, tied = MODELS[request.param]
    found = tmp_path_factory.mktemp("model") / "model.gguf"
    # Scores of attention beyond 1e9 would be rounded by more than a softmax in float32 bears.
    write_gguf(found, arch, type_name, tied=tied, scale=2.0**-10)
    return found


def logprobs(path: Path | str, prompts: list[list[int]], **options: Any) -> torch.Tensor:
    return prompt_logprobs(Path(path), **{**OPTIONS, "prompts": prompts, **options})


def test_logits_are_those_of_the_floats(path: Path) -> None:
    floats = logprobs(path, PROMPTS, gguf_compute="dequantize")
    assert float((logprobs(path, PROMPTS) - floats).abs().max()) < 2e-3 * float(floats.abs().max())


def test_decoding_gives_the_tokens_of_the_floats(path: Path) -> None:
    ours = tokens(run(path, sampling(max_tokens=16), **OPTIONS))
    theirs = tokens(run(path, sampling(max_tokens=16), gguf_compute="dequantize", **OPTIONS))
    assert ours == theirs


def test_a_request_alone_gives_the_tokens_of_the_floats(path: Path) -> None:
    options = {**OPTIONS, "prompts": PROMPTS[1:2]}
    ours = tokens(run(path, sampling(max_tokens=16), **options))
    theirs = tokens(run(path, sampling(max_tokens=16), gguf_compute="dequantize", **options))
    assert ours == theirs


def test_graphs_change_no_token(path: Path) -> None:
    graphs, eager = (
        tokens(run(path, sampling(max_tokens=16), enforce_eager=eager, **OPTIONS))
        for eager in (False, True)
    )
    assert graphs == eager


def test_memory_is_the_files(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "llama", "Q4_K", tied=False)
    options = {**SETTINGS, "max_model_len": 128, "device": "cuda", "dtype": "bfloat16"}
    with LLM(str(tmp_path / "model.gguf"), **options) as llm:
        assert isinstance(llm.engine.executor, InProcessExecutor)
        model = llm.engine.executor.worker.model
        held = sum(one.nbytes for one in (*model.parameters(), *model.buffers()) if one.ndim > 1)
    weights = 2 * (4 * 64 * 256 + 2 * 2 * 64 * 256 + 256 * 256 + 3 * 256 * 256) + 2 * 40 * 256
    assert held < 1.3 * weights * 144 / 256  # rotary tables, too


def test_the_default_model_is_what_its_floats_are(default_model: str) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 512}
    prompts = [[1 + (index * step) % 49000 for index in range(300)] for step in (17, 101)]
    floats = logprobs(default_model, prompts, gguf_compute="dequantize", **options)
    ours = logprobs(default_model, prompts, **options)
    assert float((ours - floats).abs().mean()) < 0.05
