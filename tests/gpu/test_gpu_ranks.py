"""Tensor-parallel ranks and pipeline stages on a GPU, two of which share the one that is there.

NCCL refuses that. Peer memory does not, if torch is told to allow it. Gloo takes what is larger.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_runs import PROMPTS, SETTINGS, as_inputs, prompt_logprobs, run, sampling, tokens
from test_gpu_lora import write_adapter
from tiny_models import make_checkpoint

from penstock import llm as llm_module
from penstock.config import EngineConfig
from penstock.distributed.mesh import Mesh, RankGroup
from penstock.executor.multi_process import MultiProcessExecutor
from penstock.layers.build import Build
from penstock.layers.expert_exchange import ExpertExchange, GatheringExchange
from penstock.layers.expert_placement import PlacedExperts
from penstock.llm import LLM
from penstock.loading.source import ModelSource
from penstock.ops.registry import Ops
from penstock.protocol.errors import EngineDeadError
from penstock.runner.graphs import GraphPool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

EXPERTS = ["gate_proj", "up_proj", "down_proj"]
# Chosen over shards; the last two gather.
SHARDED = [
    sampling(),
    sampling(temperature=0.9, seed=5),
    sampling(temperature=0.7, seed=6, top_k=7),
    sampling(temperature=0.9, seed=8, min_p=0.1),
    sampling(temperature=0.8, seed=9, top_k=30, top_p=0.8),
    sampling(),
]
MIXED = [
    *SHARDED[:3],
    sampling(temperature=0.9, seed=8, logprobs=3),
    sampling(temperature=1.1, seed=7, top_p=0.8, repetition_penalty=1.3),
    sampling(temperature=1.0, seed=11, top_p=0.9),
]


@pytest.fixture
def shared_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of two ranks have both on the first GPU."""
    find_model = llm_module.find_model

    def find(config: EngineConfig) -> tuple[EngineConfig, ModelSource]:
        config, source = find_model(config)
        if config.parallel.num_ranks == 2:
            config = replace(config, device=replace(config.device, device_ids=(0, 0)))
        return config, source

    monkeypatch.setattr(llm_module, "find_model", find)
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")


def run_ranks(checkpoint: Path, params: Sequence[Any], **options: Any) -> tuple[Any, Counter[str]]:
    """Tokens of two ranks, and how many steps ran as graphs or not."""
    steps = Counter[str]()
    settings = {**SETTINGS, "dtype": "float32", "tensor_parallel_size": 2, **options}
    with LLM(str(checkpoint), **settings) as llm:
        executor = llm.engine.executor
        collect = executor.collect

        def counting() -> Any:
            result = collect()
            steps.update(result.metrics)
            return result

        executor.collect = counting  # type: ignore[method-assign]
        assert llm.engine.limits.max_in_flight == (1 if "async_scheduling" in options else 2)
        outputs = llm.generate(as_inputs(PROMPTS), list(params), use_tqdm=False)
    return tokens(outputs), steps


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An odd vocabulary: the second shard begins at no multiple of 4, and has padding."""
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", vocab_size=253)


@pytest.mark.usefixtures("shared_gpu")
@pytest.mark.parametrize("params", [SHARDED, MIXED], ids=["sharded", "mixed"])
def test_two_ranks_with_graphs_give_one_ranks_tokens(qwen3: Path, params: list[Any]) -> None:
    expected = tokens(run(qwen3, params))
    found, steps = run_ranks(qwen3, params)
    assert found == expected
    assert steps["graph_steps"] > steps["eager_steps"]


@pytest.mark.usefixtures("shared_gpu")
@pytest.mark.parametrize("params", [SHARDED, MIXED], ids=["sharded", "mixed"])
def test_two_stages_with_graphs_give_one_ranks_tokens(qwen3: Path, params: list[Any]) -> None:
    """Two steps are in flight, one on each stage. The last stage counts its steps."""
    expected = tokens(run(qwen3, params))
    found, steps = run_ranks(qwen3, params, tensor_parallel_size=1, pipeline_parallel_size=2)
    assert found == expected
    assert steps["graph_steps"] > steps["eager_steps"]


@pytest.mark.usefixtures("shared_gpu")
def test_experts_of_two_ranks_give_one_ranks_tokens(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "qwen3_moe")
    expected = tokens(run(model, SHARDED))
    found, steps = run_ranks(model, SHARDED)
    assert found == expected
    assert steps["graph_steps"] > steps["eager_steps"]


@pytest.mark.usefixtures("shared_gpu")
@pytest.mark.parametrize("backend", ["all_to_all", "allgather_reducescatter"])
def test_experts_of_two_replicas_give_one_ranks_tokens(tmp_path: Path, backend: str) -> None:
    """Also with adapters of experts. Gloo takes what replicas exchange."""
    model = make_checkpoint(tmp_path / "model", "qwen3_moe")
    adapters = [write_adapter(tmp_path / f"a{n}", model, n, 4, EXPERTS) for n in range(2)]
    mixed = [None, *adapters, *adapters, None]
    settings: dict[str, Any] = {**SETTINGS, "dtype": "float32", "enable_lora": True}
    spread = {"data_parallel_size": 2, "enable_expert_parallel": True, "all2all_backend": backend}
    found = []
    for options in ({}, spread):
        with LLM(str(model), **settings, **options) as llm:
            found.append([
                tokens(llm.generate(as_inputs(PROMPTS), SHARDED, lora_request=own, use_tqdm=False))
                for own in (None, mixed)
            ])  # fmt: skip
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


@pytest.mark.parametrize("kind", [ExpertExchange, GatheringExchange])
def test_nccl_takes_what_experts_exchange(tmp_path: Path, kind: type[ExpertExchange]) -> None:
    """Of a single rank, as there is one GPU."""
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=0, world_size=1)
    try:
        ep, here = RankGroup(0, 1, dist.group.WORLD), torch.device("cuda")
        build = Build(torch.float32, here, 64, Ops("cpu"), Mesh(ep=ep))
        x, weights = torch.randn(5, 8, device=here), torch.rand(5, 2, device=here)
        ids = torch.tensor([[3, 1], [0, 2], [1, 0], [2, 3], [3, 0]], device=here)
        slots = torch.tensor([-1, 0, 3, -1, 1], dtype=torch.int32, device=here)

        def run(
            slots: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
        ) -> torch.Tensor:
            """Tells experts and slots apart."""
            return x * (weights * (1 + ids)).sum(1, keepdim=True) * (2 + slots)[:, None]

        placed = PlacedExperts([(0, 1, 2, 3)], 4, 0, here)
        found = kind(build, 8, False)(x, weights, ids, slots, placed, run)
        torch.testing.assert_close(found, run(slots, x, weights, ids))
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("shared_gpu")
def test_teacher_forced_logits_of_two_ranks_are_as_near_in_bfloat16(qwen3: Path) -> None:
    exact = prompt_logprobs(qwen3)
    one = (prompt_logprobs(qwen3, dtype="bfloat16") - exact).abs()
    two = (prompt_logprobs(qwen3, dtype="bfloat16", tensor_parallel_size=2) - exact).abs()
    assert two.mean() < 1.5 * one.mean()
    assert two.max() < 2 * one.max()


@pytest.mark.usefixtures("shared_gpu")
def test_a_rank_that_waits_on_the_gpu_ends_with_the_other(qwen3: Path) -> None:
    settings = {**SETTINGS, "dtype": "float32", "tensor_parallel_size": 2}
    with LLM(str(qwen3), **settings) as llm:
        executor = llm.engine.executor
        assert isinstance(executor, MultiProcessExecutor)
        first, second = executor._processes
        second.kill()
        with pytest.raises(EngineDeadError, match="worker 1 of 2 died"):
            llm.generate(as_inputs(PROMPTS), sampling(), use_tqdm=False)
        assert first.wait(60) == -signal.SIGKILL


def test_a_collective_of_nccl_is_captured(tmp_path: Path) -> None:
    """Of a single rank, as there is one GPU. What it launches is captured all the same."""
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=0, world_size=1)
    try:
        x = torch.ones(4, device="cuda")
        dist.all_reduce(x)  # connects
        graph, _ = GraphPool(enabled=True).capture(lambda: dist.all_reduce(x.add_(1)))
        graph.replay()
        graph.replay()
        assert x.tolist() == [3.0] * 4
    finally:
        dist.destroy_process_group()
