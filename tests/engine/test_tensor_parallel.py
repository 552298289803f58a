"""Two ranks give one rank's tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tiny_engine import OPTIONS
from tiny_models import config_of, make_checkpoint

from penstock import LLM, SamplingParams
from penstock.distributed.group import Group
from penstock.engine.core import EngineCore
from penstock.executor.multi_process import MultiProcessExecutor
from penstock.layers.build import Build
from penstock.models.registry import build_model
from penstock.ops.registry import Ops
from penstock.protocol.errors import ConfigError, EngineDeadError, ModelError


def run(model: Path, ranks: int) -> list[list[int]]:
    rng = random.Random(5)
    prompts = [{"prompt_token_ids": [rng.randrange(250) for _ in range(n)]} for n in (2, 9, 33, 60)]
    params = [
        SamplingParams(temperature=0, max_tokens=16),
        SamplingParams(temperature=0.9, seed=1, max_tokens=16, repetition_penalty=1.1),
    ]
    with LLM(str(model), tensor_parallel_size=ranks, max_num_batched_tokens=64, **OPTIONS) as llm:
        outputs = llm.generate(
            [prompt for prompt in prompts for _ in params], params * len(prompts), use_tqdm=False
        )
    return [output.outputs[0].token_ids for output in outputs]


def test_two_ranks_give_one_ranks_tokens(tmp_path: Path) -> None:
    """With a vocabulary that does not split evenly, and fewer key heads than ranks."""
    odd = {"vocab_size": 251, "num_key_value_heads": 1}
    model = make_checkpoint(tmp_path, "llama_tied_biased", **odd)
    assert run(model, ranks=2) == run(model, ranks=1)


def test_ranks_that_do_not_divide_the_model_are_refused() -> None:
    group = Group(rank=0, size=3)
    build = Build(torch.float32, torch.device("cpu"), 64, Ops("cpu"), tp=group)
    with pytest.raises(ConfigError, match="tensor_parallel_size must divide the model's 4"):
        build_model(config_of("llama"), build)


def test_a_rank_that_cannot_load_says_why(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "llama")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        LLM(str(model), tensor_parallel_size=2, **OPTIONS)


def test_the_death_of_a_rank_is_seen_at_once(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "llama")
    with LLM(str(model), tensor_parallel_size=2, **OPTIONS) as llm:
        engine = llm.engine
        assert isinstance(engine, EngineCore)
        assert isinstance(engine.executor, MultiProcessExecutor)
        engine.executor._processes[1].kill()
        with pytest.raises(EngineDeadError, match="worker"):
            llm.generate(
                {"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=4), use_tqdm=False
            )
