"""Chunks, the prefix cache, preemption and steps in flight, all at once, on every architecture: no
request may notice. Parity with transformers, alone and batched, is in test_parity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import greedy_tokens, open_llm, random_prompts
from tiny_models import make_checkpoint

from penstock import LLM, SamplingParams
from penstock.executor.in_process import InProcessExecutor
from penstock.kvcache.layout import blocks_for_request, plan_groups
from penstock.models.architectures import ARCHITECTURES
from penstock.protocol.kv import ChunkedLocalSpec, RecurrentSpec, SlidingWindowSpec

# These have windows or chunks: the others' other tests go through the same.
WINDOWED = (
    "mistral_windowed", "qwen2_windowed", "smollm3_windowed", "gemma2", "gemma3", "gpt_oss",
    "llama4",
)  # fmt: skip
OTHERS = sorted({known.parity[-1] for known in ARCHITECTURES.values()} - {*WINDOWED})
EVERY = [*WINDOWED, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]

MAX_MODEL_LEN = 128
UNWINDOWED_LEN = 88  # the longest prompt and its output: a cache for more would not be crowded
STEP_TOKENS = 7
BLOCK_SIZE = 4
PROMPTS = random_prompts(4, 3, 17, 40, 70)
OPTIONS = {"max_model_len": MAX_MODEL_LEN, "block_size": BLOCK_SIZE}


def executor_of(llm: LLM) -> InProcessExecutor:
    executor = llm.engine.executor
    assert isinstance(executor, InProcessExecutor)
    return executor


@pytest.mark.parametrize("variant", EVERY)
def test_a_crowded_engine_changes_nothing(variant: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, variant)
    with open_llm(checkpoint, enable_prefix_caching=False, max_num_seqs=1, **OPTIONS) as llm:
        alone = greedy_tokens(llm, PROMPTS)
        specs = executor_of(llm).capabilities.kv_specs
    windowed = SlidingWindowSpec | ChunkedLocalSpec
    has_window = any(isinstance(spec, windowed) for spec in specs.values())
    max_model_len = MAX_MODEL_LEN if has_window else UNWINDOWED_LEN
    groups, _ = plan_groups(specs, BLOCK_SIZE, max_model_len)
    needed = blocks_for_request(groups, max_model_len, max_step_tokens=STEP_TOKENS)
    with open_llm(
        checkpoint,
        max_model_len=max_model_len,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=STEP_TOKENS,  # prompts in chunks
        num_gpu_blocks_override=needed + 2,  # one request, and hardly another
        async_scheduling=True,
    ) as llm:
        assert greedy_tokens(llm, PROMPTS) == alone
        assert greedy_tokens(llm, PROMPTS) == alone  # from the prefix cache, as far as it reaches
        is_recurrent = any(isinstance(spec, RecurrentSpec) for spec in specs.values())
        # Requests with few blocks wait sooner than they give way: see test_recurrent_models.
        assert is_recurrent or llm.engine.stats().num_preemptions > 0
    with open_llm(checkpoint, max_num_batched_tokens=STEP_TOKENS, **OPTIONS) as llm:  # with room
        assert greedy_tokens(llm, PROMPTS) == alone
        assert greedy_tokens(llm, PROMPTS) == alone
        assert llm.engine.stats().num_prefix_hits > 0


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("variant", ["qwen2_windowed", "gpt_oss", "llama4"])
def test_blocks_behind_a_window_or_a_chunk_are_given_back_and_not_read(
    variant: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint(tmp_path, variant)
    prompt = {"prompt_token_ids": PROMPTS[3]["prompt_token_ids"]}
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    options = {
        **OPTIONS, "enable_prefix_caching": False, "max_num_batched_tokens": 16,
        "num_gpu_blocks_override": 150,
    }  # fmt: skip
    with open_llm(checkpoint, cpu_backend=backend, **options) as llm:
        expected = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
    with open_llm(checkpoint, cpu_backend=backend, **options) as llm:
        runner = executor_of(llm).worker.runner
        assert runner is not None
        manager = llm.engine.scheduler.kv
        num_held: list[int] = []
        launch = runner.launch

        def poison_and_launch(plan: Any) -> Any:
            """What nobody holds becomes no number at all before every step."""
            held = [block.id for block in manager.pool.blocks if block.ref_count]
            num_held.append(len(held))
            free = torch.ones(len(manager.pool.blocks), dtype=torch.bool)
            free[held] = False
            for cache in runner.memory.caches.values():
                cache[free] = float("nan")
            return launch(plan)

        monkeypatch.setattr(runner, "launch", poison_and_launch)
        ours = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
        groups = runner.memory.layout.groups
    assert ours == expected
    assert max(num_held) < sum(-(-120 // group.block_size) for group in groups)
