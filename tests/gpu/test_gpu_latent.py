"""Latent attention, and experts chosen as DeepSeek does, on a GPU: the CPU's tokens in float32, and
as near to exact in bfloat16 as another correct path is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from gpu_runs import PROMPTS, run, sampling, tokens
from test_gpu_bfloat16 import EXACT, OTHER, OURS, assert_as_near, differences, logprobs
from tiny_models import make_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GREEDY = sampling(max_tokens=24)
VARIANTS = ["deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "glm4_moe", "minimax_m2"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_are_the_cpus(variant: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, variant)
    expected = tokens(run(checkpoint, GREEDY, device="cpu", cpu_backend="torch"))
    for options in ({}, {"enforce_eager": True}, {"max_num_batched_tokens": 48}):
        assert tokens(run(checkpoint, GREEDY, device="cuda", **options)) == expected, options


def test_long_prompts_are_the_cpus_whole_and_in_chunks(tmp_path: Path) -> None:
    """Steps beyond the largest bucket: prompts are expanded, chunks behind others absorbed."""
    prompts = [[1 + (index * step) % 250 for index in range(length)]
               for step, length in ((1, 700), (3, 5), (7, 1200), (11, 333), (5, 512))]  # fmt: skip
    checkpoint = make_checkpoint(tmp_path, "deepseek_v2", max_position_embeddings=2048)
    options: dict[str, Any] = {"max_model_len": 2048, "prompts": prompts}
    expected = tokens(run(checkpoint, GREEDY, device="cpu", cpu_backend="torch", **options))
    for batched in (8192, 1000):
        found = run(checkpoint, GREEDY, device="cuda", max_num_batched_tokens=batched, **options)
        assert tokens(found) == expected, batched


def test_in_bfloat16_logits_are_as_near_to_exact_as_another_paths(tmp_path: Path) -> None:
    """Without experts: which of them are chosen would be a matter of the last bits."""
    checkpoint = make_checkpoint(tmp_path, "deepseek_v2", first_k_dense_replace=3)
    path = checkpoint / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    rounded = {name: tensor.bfloat16().float() for name, tensor in weights.items()}
    safetensors.torch.save_file(rounded, path, metadata={"format": "pt"})
    exact = logprobs(checkpoint, PROMPTS, EXACT)
    other = differences(logprobs(checkpoint, PROMPTS, OTHER), exact)
    for options in ({}, {"enforce_eager": True}, {"max_num_batched_tokens": 48}):
        ours = differences(logprobs(checkpoint, PROMPTS, {**OURS, **options}), exact)
        assert_as_near(ours, other)
