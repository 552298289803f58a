"""Pipeline stages on the way of a GPU, without one: padded steps, and what graphs read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import Oracle
from eagle_heads import make_eagle, make_head
from mtp_targets import make_target
from replay_pool import ReplayPool
from stages import local_stages, stages_of
from tiny_models import make_checkpoint

from penstock import LLM, SamplingParams
from penstock.distributed.stage_link import States
from penstock.executor import worker
from penstock.executor.worker import Worker
from penstock.ops import registry
from penstock.runner.hand_over import HandOver
from penstock.runner.runner import ModelRunner

pytest.importorskip("triton", reason="needs Triton")

from device_parts import OPTIONS, SHAPE, VOCAB_SIZE, sampling, use_device_parts

from penstock.runner.device_steps import DeviceSteps
from penstock.runner.device_tables import DeviceTables

__all__ = ["local_stages"]
pytestmark = [
    pytest.mark.usefixtures("local_stages"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="kernels are compiled for the GPU there: see tests/gpu"
    ),
]

CPU = torch.device("cpu")
PROMPTS = [{"prompt_token_ids": [1 + (i * 7) % 60 for i in range(n)]} for n in (1, 9, 4)]
PARAMS = [sampling(4, temperature=0.0), sampling(5, temperature=0.0)]
PARAMS += [sampling(6, temperature=0.9, seed=4, top_k=9)]


def take_device_path(llm: LLM) -> list[ReplayPool]:
    """Put the parts that a GPU has into all stages of an engine on a CPU."""
    pools = []
    for stage in stages_of(llm):
        runner = stage.runner
        assert runner is not None
        if isinstance(runner.head, HandOver):
            use_parts_of_early_stage(runner)
        else:
            use_device_parts(runner, stage.drafter)
        pools.append(ReplayPool())
        steps_of(stage).pool = pools[-1]
    return pools


def use_parts_of_early_stage(runner: ModelRunner) -> None:
    num_drafts = runner.tables.width - 1
    tables = DeviceTables(4, 32, runner.tables.groups, CPU, num_drafts)
    assert runner.link is not None
    runner.steps = DeviceSteps(
        runner.model, VOCAB_SIZE, tables, runner.memory, max_num_batched_tokens=16,
        num_drafts=num_drafts, capture_graphs=False, dtype=torch.float32, has_logits=False,
        keeps_drafts=runner.memory.layout.is_recurrent,
    )  # fmt: skip
    runner.tables, runner.head = tables, HandOver(runner.link, tables)
    if runner.memory.layout.is_recurrent:
        runner.head.replay = runner.steps.replay


def steps_of(stage: Worker) -> DeviceSteps:
    assert stage.runner is not None
    assert isinstance(stage.runner.steps, DeviceSteps)
    return stage.runner.steps


def leave_nan(steps: DeviceSteps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step finds in the buffers what a failed request may leave there."""
    take = steps._take

    def take_after_nan(handed: States | None, num_rows: int) -> None:
        steps._handed.fill_(torch.nan)
        take(handed, num_rows)

    monkeypatch.setattr(steps, "_take", take_after_nan)


def tokens(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert all(output.error is None for output in outputs)
    return [list(output.outputs[0].token_ids) for output in outputs]


def make_drafted(folder: Path, method: str | None) -> tuple[str, dict[str, Any]]:
    """A checkpoint, and the options for a head that drafts for it."""
    shape = {**SHAPE, "num_hidden_layers": 2}
    if method == "mtp":
        target = make_target(folder, "mimo", **shape)
        settings: dict[str, Any] = {"num_speculative_tokens": 1}
    else:
        target = make_checkpoint(folder / "target", "llama", **shape)
        settings = {"num_speculative_tokens": 2}
    if method == "eagle":
        settings["model"] = str(make_eagle(folder / "head", target))
    elif method == "eagle3":
        settings["model"] = str(make_head(folder / "head", target, num_tokens=40)[0])
    if method is None:
        return str(target), {}
    return str(target), {"speculative_config": {"method": method, "adaptive": False, **settings}}


@pytest.mark.parametrize(
    "method", [None, "eagle3", *(pytest.param(m, marks=pytest.mark.slow) for m in ("eagle", "mtp"))]
)
def test_stages_replay_their_steps_and_give_one_ranks_tokens(
    method: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps have padding, as two requests are less than any size but that of one."""
    checkpoint, drafts = make_drafted(tmp_path, method)
    with LLM(checkpoint, **OPTIONS) as llm:
        expected = tokens(llm, PARAMS)
    monkeypatch.setitem(registry.BACKENDS, "cpu", registry.BACKENDS["cuda"])
    with LLM(checkpoint, pipeline_parallel_size=2, **OPTIONS, **drafts) as llm:
        pools = take_device_path(llm)
        leave_nan(steps_of(stages_of(llm)[1]), monkeypatch)
        assert tokens(llm, PARAMS) == expected
        for stage, pool in zip(stages_of(llm), pools, strict=True):
            assert pool.num_replayed > pool.num_captured > 1
            steps = steps_of(stage)
            if method is not None:
                assert any(bucket.width > 1 for bucket in steps._captured if bucket.decode)
            caches = steps.buffers.memory.caches.values()
            assert all(cache.isfinite().all() for cache in caches), "padding reaches the null block"


RECURRENT = {
    "mamba2": {"num_heads": 2, "head_dim": 32, "n_groups": 1},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 1, "linear_num_value_heads": 2, "mlp_only_layers": [0, 1, 2, 3],
    },
}  # fmt: skip


@pytest.mark.parametrize("variant", ["mamba2", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_recurrent_layers_go_on_from_accepted_drafts(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage learns which ones while the next step, of other requests, is in flight."""
    shape = {**SHAPE, "num_hidden_layers": 2 if variant == "mamba2" else 4, **RECURRENT[variant]}
    checkpoint = str(make_checkpoint(tmp_path, variant, **shape))
    prompts = [{"prompt_token_ids": [1 + (i * 7) % 60] * 9} for i in range(5)]
    params = [sampling(6 + 2 * index, temperature=0.0) for index in range(5)]
    with LLM(checkpoint, **OPTIONS) as llm:
        expected = [
            output.prompt_token_ids + output.outputs[0].token_ids
            for output in llm.generate(prompts, params, use_tqdm=False)
        ]
    monkeypatch.setitem(registry.BACKENDS, "cpu", registry.BACKENDS["cuda"])
    monkeypatch.setattr(worker, "make_drafter", lambda *_: Oracle(expected, 1, 3, wrong_every=3))
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    with LLM(checkpoint, pipeline_parallel_size=2, speculative_config=drafts, **OPTIONS) as llm:
        *_, pool_of_last = take_device_path(llm)
        pool_of_last.enabled = False  # its graphs of accepted drafts may run once only
        found = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.engine.speculation_stats()
    assert [each.prompt_token_ids + each.outputs[0].token_ids for each in found] == expected
    assert stats.num_draft_tokens > stats.num_accepted_tokens > stats.num_drafts
