"""The parts of a GPU's runner, put into an engine on a CPU: kernels run in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lora_slots import runner_of

from penstock import LLM, SamplingParams
from penstock.ops.verification import Verified
from penstock.runner.drafter import Drafter
from penstock.runner.generation import GenerationHead
from penstock.runner.layout import StepLayout
from penstock.runner.runner import ModelRunner
from penstock.runner.sampler import SampledTokens, Sampler, SamplingRows

pytest.importorskip("triton", reason="needs Triton")

from penstock.ops.triton.sampling import choose_tokens
from penstock.runner.device_batch import Bucket
from penstock.runner.device_steps import DeviceSteps
from penstock.runner.device_tables import DeviceTables
from penstock.runner.sampling_graphs import SamplingGraphs

CPU = torch.device("cpu")
VOCAB_SIZE = 64
SHAPE = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True, "cpu_threads": 1, "cpu_backend": "torch", "max_model_len": 32,
    "max_num_seqs": 4, "max_num_batched_tokens": 16, "log_level": "error",
    "kv_cache_memory_bytes": 2**24,
}  # fmt: skip
PROMPTS = [{"prompt_token_ids": [1 + (index * 7) % 60 for index in range(n)]} for n in (1, 9)]


def sampling(max_tokens: int = 3, **settings: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **settings)


class WatchedGraphs(SamplingGraphs):
    """Remembers for how many steps it served."""

    num_served = num_declined = 0

    def sample(
        self, logits: torch.Tensor, rows: SamplingRows, has_drafts: bool = False
    ) -> tuple[SampledTokens, Verified | None] | None:
        sampled = super().sample(logits, rows, has_drafts)
        if sampled is None:
            self.num_declined += 1
        else:
            self.num_served += 1
        return sampled


class WatchedSteps(DeviceSteps):
    """Remembers the buckets of its steps."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.buckets: list[Bucket | None] = []

    def _bucket_for(self, layout: StepLayout) -> Bucket | None:
        self.buckets.append(super()._bucket_for(layout))
        return self.buckets[-1]


def take_device_path(
    llm: LLM, drafter: Drafter | None = None, vocab_size: int = VOCAB_SIZE
) -> WatchedGraphs:
    """Put the parts that a GPU has into the runner of an engine on a CPU."""
    return use_device_parts(runner_of(llm), drafter, vocab_size)


def use_device_parts(
    runner: ModelRunner, drafter: Drafter | None = None, vocab_size: int = VOCAB_SIZE
) -> WatchedGraphs:
    num_drafts = 0 if drafter is None else drafter.num_drafts
    tables = DeviceTables(4, 32, runner.tables.groups, CPU, num_drafts)
    steps = WatchedSteps(
        runner.model, vocab_size, tables, runner.memory, max_num_batched_tokens=16,
        num_drafts=num_drafts, capture_graphs=False, dtype=torch.float32,
        adapters=runner.adapters, drafter=drafter,
    )  # fmt: skip
    sampler = Sampler(tables, vocab_size, CPU, choose_tokens)
    reports_drafts = runner.link is not None
    head = GenerationHead(runner.model, tables, sampler, drafter, reports_drafts=reports_drafts)
    head.graphs = WatchedGraphs(steps.buffers, steps.logits, tables, sampler, steps.pool)
    if runner.memory.layout.is_recurrent:
        head.replay = steps.replay
    if drafter is not None:
        drafter.start(tables, runner.memory, sampler)
        drafter.use_graphs(steps.pool)
    runner.tables, runner.steps, runner.head = tables, steps, head
    return head.graphs


def generate(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert all(output.error is None for output in outputs)
    return [list(output.outputs[0].token_ids) for output in outputs]
