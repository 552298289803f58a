"""Experts that are spread over ranks give one rank's tokens."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from lora.adapters import FLAVOURS, make_flavour, make_single_experts
from tiny_engine import OPTIONS, open_llm, random_prompts
from tiny_models import make_checkpoint

from penstock import LLM, AsyncLLM, SamplingParams
from penstock.config import EngineConfig
from penstock.engine.group import EngineGroup
from penstock.executor.multi_process import MultiProcessExecutor
from penstock.loading.adapters.source import adapter_digest
from penstock.protocol.adapter import Adapter, LoRARequest
from penstock.protocol.errors import ConfigError, EngineDeadError, InputError
from penstock.scheduler.stats import AdapterStats

PROMPTS = random_prompts(22, 3, 17, 40)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, seed=7, max_tokens=12, ignore_eos=True, logprobs=2),
]
IN_CHUNKS = {"max_num_batched_tokens": 16}
ODD_EXPERTS = {"num_experts": 5}  # ranks have different numbers of them
BALANCED = {  # with a move of experts every few steps
    "enable_eplb": True,
    "eplb_config": {"num_redundant_experts": 1, "window_size": 3, "step_interval": 4},
}

GATHERED = {"all2all_backend": "allgather_reducescatter"}  # sums have another order
SPREAD = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True}


def generate(llm: LLM) -> list[tuple[list[int], list[dict[int, float]]]]:
    """Tokens and log-probabilities of each prompt, greedy and seeded, all at once."""
    prompts = [prompt for prompt in PROMPTS for _ in PARAMS]
    results = []
    for output in llm.generate(prompts, PARAMS * len(PROMPTS), use_tqdm=False):
        (answer,) = output.outputs
        assert answer.logprobs is not None
        rows = [{token: found.logprob for token, found in row.items()} for row in answer.logprobs]
        results.append((list(answer.token_ids), rows))
    return results


def assert_same(found: Any, expected: Any, tolerance: float) -> None:
    """Tokens are equal, and log-probabilities nearly."""
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, rows), (_, others) in zip(found, expected, strict=True):
        for row, other in zip(rows, others, strict=True):
            assert row == pytest.approx(other, abs=tolerance)


def without_ranks(options: dict[str, Any]) -> dict[str, Any]:
    left_out = {*BALANCED, "pipeline_parallel_size"}
    return {name: value for name, value in options.items() if name not in left_out}


def check_moves(llm: LLM, options: dict[str, Any]) -> None:
    """Experts have moved while the requests ran, if they may."""
    metrics = llm.engine.take_metrics()
    if "enable_eplb" in options:
        assert metrics["expert_moves"] > 0
        assert metrics["expert_tokens_busiest"] > metrics["expert_tokens_mean"] > 0
    else:
        assert "expert_moves" not in metrics


def kill_rank(llm: LLM, rank: int) -> None:
    executor = llm.engine.executor
    assert isinstance(executor, MultiProcessExecutor)
    executor._processes[rank].kill()


@pytest.mark.parametrize(
    ("variant", "sizes", "options"),
    [
        ("qwen3_moe", ODD_EXPERTS, IN_CHUNKS),
        pytest.param("mixtral", {}, IN_CHUNKS, marks=pytest.mark.slow),
        pytest.param("deepseek_v2", {}, IN_CHUNKS, marks=pytest.mark.slow),
        pytest.param("qwen2_moe", {}, {"cpu_backend": "torch"}, marks=pytest.mark.slow),
        pytest.param("llama4", {}, {}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {}, {"async_scheduling": True}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {}, BALANCED | {"async_scheduling": True}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {}, BALANCED | IN_CHUNKS, marks=pytest.mark.slow),
        pytest.param(
            "deepseek_v2", {}, BALANCED | {"quantization": "int8"}, marks=pytest.mark.slow
        ),
        pytest.param("qwen3_next", {}, IN_CHUNKS, marks=pytest.mark.slow),
        # The first stage has no experts.
        pytest.param(
            "deepseek_v2",
            {"num_hidden_layers": 2, "first_k_dense_replace": 1},
            BALANCED | {"pipeline_parallel_size": 2},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_two_ranks_with_some_experts_each_give_one_ranks_tokens(
    tmp_path: Path, variant: str, sizes: dict[str, int], options: dict[str, Any]
) -> None:
    """Also from the prefix cache; and no rank goes on alone after the other was killed."""
    checkpoint = make_checkpoint(tmp_path, variant, **sizes)
    with open_llm(checkpoint, **without_ranks(options)) as llm:
        expected = generate(llm)
    spread = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    with open_llm(checkpoint, **options, **spread) as llm:
        for _ in range(2):
            assert_same(generate(llm), expected, tolerance=1e-4)
        assert llm.engine.stats().num_prefix_hits > 0
        check_moves(llm, options)
        kill_rank(llm, 1)
        with pytest.raises(EngineDeadError, match="worker"):
            generate(llm)


@pytest.mark.parametrize(
    ("variant", "tp", "options", "is_exact"),
    [
        ("qwen2_moe", 1, BALANCED | IN_CHUNKS, True),  # with a shared expert
        pytest.param("qwen2_moe", 1, IN_CHUNKS, True, marks=pytest.mark.slow),
        pytest.param("deepseek_v2", 1, IN_CHUNKS, False, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 1, IN_CHUNKS, True, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 2, IN_CHUNKS, False, marks=pytest.mark.slow),
        pytest.param("mixtral", 1, {"cpu_backend": "torch"}, False, marks=pytest.mark.slow),
        # With tensor parallelism, each rank would round its own share of a row.
        pytest.param(
            "mixtral", 1, BALANCED | {"quantization": "fp8"}, False, marks=pytest.mark.slow
        ),
        pytest.param("llama4", 1, {}, False, marks=pytest.mark.slow),
        pytest.param("llama4", 1, GATHERED, False, marks=pytest.mark.slow),
        pytest.param("qwen2_moe", 1, GATHERED | BALANCED, False, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 2, GATHERED | IN_CHUNKS, False, marks=pytest.mark.slow),
        pytest.param(
            "gpt_oss", 1, GATHERED | {"cpu_backend": "torch"}, False, marks=pytest.mark.slow
        ),
    ],
)
def test_replicas_that_share_experts_give_one_ranks_tokens(
    tmp_path: Path, variant: str, tp: int, options: dict[str, Any], is_exact: bool
) -> None:
    """Bit for bit where a row's attention does not depend on the batch. Also if only one replica
    has requests; from the prefix cache; and no rank goes on alone after another was killed."""
    checkpoint = make_checkpoint(tmp_path, variant)
    with open_llm(checkpoint, **without_ranks(options)) as llm:
        expected = generate(llm)
        longest = llm.generate(PROMPTS[2], PARAMS[0], use_tqdm=False)
    spread = {"data_parallel_size": 2, "enable_expert_parallel": True, "tensor_parallel_size": tp}
    with open_llm(checkpoint, **options, **spread) as llm:
        assert isinstance(llm.engine, EngineGroup)
        for _ in range(2):
            found = generate(llm)
            assert_same(found, expected, tolerance=1e-4)
            assert found == expected or not is_exact
        assert all(core.stats().num_prefix_queries for core in llm.engine.cores)
        assert llm.engine.stats().num_prefix_hits > 0
        check_moves(llm, options)
        alone = llm.generate(PROMPTS[2], PARAMS[0], use_tqdm=False)
        assert alone[0].outputs[0].token_ids == longest[0].outputs[0].token_ids
        kill_rank(llm, 1)
        with pytest.raises(EngineDeadError, match="worker"):
            generate(llm)


@pytest.mark.slow
def test_replicas_that_share_experts_are_restarted_together(tmp_path: Path) -> None:
    """A killed rank costs no stream a token."""
    checkpoint = make_checkpoint(tmp_path, "mixtral")
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    with open_llm(checkpoint) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        expected = [list(output.outputs[0].token_ids) for output in outputs]
    spread = {"data_parallel_size": 2, "enable_expert_parallel": True}
    killed: list[int] = []

    async def stream(engine: AsyncLLM, number: int) -> list[int]:
        tokens: list[int] = []
        async for output in engine.generate(PROMPTS[number], params, str(number)):
            tokens = list(output.outputs[0].token_ids)
            if len(tokens) > 5 and not killed:
                engines = children(os.getpid(), "penstock.engine.process")
                _, second = (rank for pid in engines for rank in children(pid, "executor.rank"))
                killed.append(second)
                os.kill(second, signal.SIGKILL)
        return tokens

    async def run() -> list[list[int]]:
        async with AsyncLLM(str(checkpoint), **OPTIONS, **spread) as engine:
            return await asyncio.gather(*(stream(engine, n) for n in range(len(PROMPTS))))

    assert asyncio.run(run()) == expected
    assert killed


def children(pid: int, module: str) -> list[int]:
    """The child processes that run a module."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(own) for own in pids if module in Path(f"/proc/{own}/cmdline").read_text()]


def generate_with(llm: LLM, adapters: Sequence[LoRARequest | None]) -> list[list[int]]:
    """Each adapter's tokens, all at once."""
    prompts = random_prompts(5, *[17] * len(adapters))
    lora = list(adapters)
    outputs = llm.generate(prompts, PARAMS[0], use_tqdm=False, lora_request=lora)
    return [list(output.outputs[0].token_ids) for output in outputs]


def step_until_loaded(llm: LLM, adapter: Adapter) -> None:
    load = llm.engine.load_adapter(adapter)
    while not load.done():
        llm._step()
    load.result()


@pytest.mark.parametrize(
    ("flavour", "options"),
    [
        ("stacked_experts", BALANCED),
        pytest.param("stacked_experts", {}, marks=pytest.mark.slow),
        pytest.param("stacked_experts", GATHERED | BALANCED, marks=pytest.mark.slow),
        pytest.param("dora", BALANCED, marks=pytest.mark.slow),
        pytest.param("stacked_experts", GATHERED, marks=pytest.mark.slow),
        pytest.param("stacked_experts", {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("stacked_transposed", {"cpu_backend": "torch"}, marks=pytest.mark.slow),
        pytest.param("shared_expert", GATHERED, marks=pytest.mark.slow),
    ],
)
def test_replicas_that_share_experts_give_each_request_its_adapters_tokens(
    tmp_path: Path, flavour: str, options: dict[str, Any]
) -> None:
    """More adapters than slots, which replicas fill at different times. Also if only one replica
    uses an adapter; if experts move; and adapters are loaded and unloaded while nothing runs."""
    variant = "qwen3_moe" if flavour == "dora" else FLAVOURS[flavour].variant
    checkpoint = make_checkpoint(tmp_path / "model", variant)
    folders = [tmp_path / f"{number}" for number in range(3)]
    for number, folder in enumerate(folders):
        if flavour == "dora":
            make_single_experts(folder, checkpoint, variant, number, use_dora=True)
        else:
            make_flavour(folder, checkpoint, flavour, number)
    first, *others = (LoRARequest(folder.name, 1, str(folder)) for folder in folders)
    mixed = [first, None, *others, None, first, first, *others]
    settings: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_num_seqs": 3, **IN_CHUNKS}
    with open_llm(checkpoint, **settings) as llm:
        expected = generate_with(llm, mixed)
        alone = generate_with(llm, [first])
        assert generate_with(llm, [None]) != alone
    spread = {"data_parallel_size": 2, "enable_expert_parallel": True}
    with open_llm(checkpoint, **settings, **spread, **options) as llm:
        assert isinstance(llm.engine, EngineGroup)
        assert generate_with(llm, [first]) == alone
        assert [stats.num_placements for stats in all_stats(llm)] == [1, 0]
        for _ in range(2):
            assert generate_with(llm, mixed) == expected
        assert all(stats.num_placements > 1 for stats in all_stats(llm))
        adapter = Adapter("ahead", adapter_digest(folders[0]), str(folders[0]))
        step_until_loaded(llm, adapter)
        llm.engine.unload_adapter(adapter.digest)
        while llm.engine.has_work():
            llm._step()
        assert [stats.num_copies for stats in all_stats(llm)] == [0, 0]
        assert generate_with(llm, mixed) == expected
        stats = llm.engine.adapter_stats()
        assert stats is not None
        assert stats.num_loads == sum(own.num_loads for own in all_stats(llm))
        with pytest.raises(InputError, match="has other weights than when it was registered"):
            step_until_loaded(llm, Adapter("changed", "another", str(folders[0])))
        check_moves(llm, options)


def all_stats(llm: LLM) -> list[AdapterStats]:
    """Of each replica."""
    assert isinstance(llm.engine, EngineGroup)
    stats = [core.adapter_stats() for core in llm.engine.cores]
    return [own for own in stats if own is not None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2, "enable_eplb": True}, "set enable_expert_parallel, and"),
        ({"enable_expert_parallel": True, "enable_eplb": True}, "or data_parallel_size above 1"),
        ({"eplb_config": {"window_size": 5}}, "eplb_config needs enable_eplb"),
        (SPREAD | {"eplb_config": {"num_redundant": 4}}, "did you mean 'num_redundant_experts'"),
        (SPREAD | {"eplb_config": {"step_interval": 0}}, "eplb_config: step_interval must be at"),
    ],
)
def test_load_balancing_without_what_it_needs_is_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options(options)
