"""Two ranks give one rank's tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tiny_models import make_checkpoint

from penstock import LLM, SamplingParams
from penstock.engine.core import EngineCore
from penstock.executor.multi_process import MultiProcessExecutor
from penstock.protocol.errors import ConfigError, EngineDeadError, ModelError

OPTIONS = {"skip_tokenizer_init": True, "cpu_threads": 1, "log_level": "warning"}


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


@pytest.mark.parametrize(
    ("variant", "overrides"),
    [
        ("llama_tied_biased", {"vocab_size": 251}),  # does not split evenly
        ("qwen3", {"num_key_value_heads": 1}),  # fewer key heads than ranks
    ],
)
def test_two_ranks_give_one_ranks_tokens(
    tmp_path: Path, variant: str, overrides: dict[str, int]
) -> None:
    model = make_checkpoint(tmp_path, variant, **overrides)
    assert run(model, ranks=2) == run(model, ranks=1)


def test_ranks_that_do_not_divide_the_model_are_refused(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match="tensor_parallel_size must divide the model's 4"):
        LLM(str(model), tensor_parallel_size=3, **OPTIONS)


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
