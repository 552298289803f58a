"""The cost model against the table of docs/benchmarks.md."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from published import PUBLISHED, planner_of, write_config

from penstock.cli.bench.workloads import named_workload
from penstock.planning.costs import StepLoad, step_seconds
from penstock.planning.hardware import GPUS, Gpu
from penstock.planning.plan import Planner
from penstock.planning.shapes import Partition, RankShape

H200 = GPUS["h200"]
LINE = re.compile(r"\| (Qwen3-\S+) `(\w+)`, [^|]+ \| ([\d.,]+) \|")
DOCS = Path(__file__).parents[2] / "docs" / "benchmarks.md"
SECTION = DOCS.read_text().partition("## GPU: one H200\n")[2].partition("\n## ")[0]
TABLE = [(name, load, float(n.replace(",", ""))) for name, load, n in LINE.findall(SECTION)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, settings in PUBLISHED.items():
        write_config(root / name, settings)
    return root


@functools.cache
def shape_in(folder: Path, name: str, tp: int = 1) -> tuple[RankShape, Planner]:
    planner = planner_of(folder / name)
    return planner.stages(Partition(tp))[0], planner


@dataclass
class PlannedRequest:
    input_len: int
    output_len: int
    computed: int = 0  # of the prompt
    generated: int = 0


def run_seconds(
    shape: RankShape,
    gpu: Gpu,
    requests: Sequence[tuple[int, int]],  # input and output tokens
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> float:
    """All requests sent at once: decodes first, then prompts, as the scheduler plans steps."""
    waiting = [PlannedRequest(*lengths) for lengths in reversed(requests)]
    running: list[PlannedRequest] = []
    seconds = 0.0
    while waiting or running:
        decodes = [own for own in running if own.generated]
        budget = max_num_batched_tokens - len(decodes)
        num_prompt, pairs, done = 0, 0.0, []
        while waiting and len(running) < max_num_seqs:
            running.append(waiting.pop())
        for own in running:
            if own.generated or not budget:
                continue
            count = min(own.input_len - own.computed, budget)
            pairs += count * (own.computed + count / 2)
            own.computed += count
            num_prompt += count
            budget -= count
            if own.computed == own.input_len:
                done.append(own)
        contexts = sum(own.input_len + own.generated for own in decodes)
        seconds += step_seconds(
            shape,
            gpu,
            StepLoad(
                len(decodes),
                contexts / max(len(decodes), 1),
                num_prompt,
                pairs / max(num_prompt, 1),
                len(decodes) + len(done),
            ),
        )
        for own in (*decodes, *done):
            own.generated += 1
        running = [own for own in running if own.generated < own.output_len]
    return seconds


def test_the_table_has_all_lines() -> None:
    assert len(TABLE) >= 10
    assert {name for name, _, _ in TABLE} == set(PUBLISHED)


@pytest.mark.parametrize(("name", "load", "measured"), TABLE)
def test_the_measured_table_is_predicted_within_15_percent(
    folder: Path, name: str, load: str, measured: float
) -> None:
    shape, planner = shape_in(folder, name)
    workload, limits = named_workload(load), planner.limits
    inputs = [len(prompt) for prompt in workload.prompts]

    def seconds(outputs: Sequence[int]) -> float:
        requests = list(zip(inputs, outputs, strict=True))
        budget = limits.max_num_batched_tokens
        return run_seconds(shape, H200, requests, limits.max_num_seqs, budget)

    if load.startswith("dec"):  # as `penstock bench latency` does
        first = seconds([1] * len(inputs))
        predicted = (seconds(workload.output_lens) - first) / (workload.output_lens[0] - 1) * 1e3
    elif load == "pre":
        predicted = sum(inputs) / seconds(workload.output_lens)
    else:
        predicted = sum(workload.output_lens) / seconds(workload.output_lens)
    assert predicted == pytest.approx(measured, rel=0.15)


def test_a_faster_gpu_is_faster(folder: Path) -> None:
    shape, _ = shape_in(folder, "Qwen3-8B")
    decode = StepLoad(num_decodes=64, context=512, num_sampled=64)
    prompt = StepLoad(num_prompt=4096, prompt_context=2048, num_sampled=1)
    wider = dataclasses.replace(H200, bandwidth=2 * H200.bandwidth)
    stronger = dataclasses.replace(H200, flops=2 * H200.flops)
    assert step_seconds(shape, wider, decode) < 0.7 * step_seconds(shape, H200, decode)
    assert step_seconds(shape, stronger, prompt) < 0.7 * step_seconds(shape, H200, prompt)


def test_a_window_bounds_what_attention_reads(folder: Path) -> None:
    shape, _ = shape_in(folder, "Qwen3-8B")
    windowed = dataclasses.replace(
        shape, attention=tuple(dataclasses.replace(own, window=256) for own in shape.attention)
    )
    short, long = (StepLoad(num_decodes=64, context=n, num_sampled=64) for n in (256, 8192))
    assert step_seconds(windowed, H200, long) == step_seconds(windowed, H200, short)
    assert step_seconds(shape, H200, long) > step_seconds(shape, H200, short)


def test_few_tokens_read_few_experts(folder: Path) -> None:
    shape, _ = shape_in(folder, "Qwen3-30B-A3B")
    one, many = (step_seconds(shape, H200, StepLoad(n, 0.0, num_sampled=n)) for n in (1, 64))
    assert many > 4 * one


def test_several_ranks_share_the_work_of_prompts(folder: Path) -> None:
    prompt = StepLoad(num_prompt=8192, prompt_context=2048, num_sampled=4)
    one, two = (step_seconds(shape_in(folder, "Qwen3-8B", tp)[0], H200, prompt) for tp in (1, 2))
    assert one / 2 < two < one
