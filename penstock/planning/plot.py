"""A plan as a plot: what fills a GPU's memory, and throughput against the time per token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.planning.hardware import GIB
from penstock.planning.plan import Plan, Planner, Split
from penstock.planning.shapes import Partition
from penstock.protocol.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WEIGHTS, STEPS, CACHE = "#3b7ea1", "#f2a65a", "#8fb996"


def plot(plan: Plan, planner: Planner, path: Path) -> None:
    """Write a PNG."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    figure.suptitle(
        f"{plan.model} on {plan.num_gpus} x {plan.gpu.name}: {plan.input_len} input and "
        f"{plan.output_len} output tokens",
        fontsize=11,
    )
    memory, speed = figure.subplots(1, 2)
    _memory(memory, plan)
    _speed(speed, plan, planner)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _memory(axes: Axes, plan: Plan) -> None:
    names = [_name(own) for own in plan.splits]
    bottom = [0.0] * len(names)
    for label, colour, sizes in (
        ("weights", WEIGHTS, [own.weight_bytes for own in plan.splits]),
        ("steps", STEPS, [own.step_bytes for own in plan.splits]),
        ("KV cache", CACHE, [own.kv_bytes for own in plan.splits]),
    ):
        heights = [size / GIB for size in sizes]
        axes.bar(names, heights, bottom=bottom, color=colour, label=label)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.axhline(plan.gpu.memory_gib, color="#333333", linewidth=1, linestyle="--")
    axes.set_ylabel("GiB of each GPU")
    axes.legend(fontsize=8)


def _name(split: Split) -> str:
    return str(Partition(split.tp, split.pp, split.ep)).replace("=", " ")


def _speed(axes: Axes, plan: Plan, planner: Planner) -> None:
    for split in plan.splits:
        if split.speed is None or not split.speed.token:
            continue
        stages = planner.stages(Partition(split.tp, split.pp, split.ep))
        counts = [2**power for power in range(split.num_requests.bit_length())]
        speeds = [planner.speed(stages, count) for count in (*counts, split.num_requests)]
        axes.plot(
            [own.batch_token * 1e3 for own in speeds],
            [own.output_rate * split.dp for own in speeds],
            marker=".",
            label=f"{_name(split)}, {split.dp} replicas" if split.dp > 1 else _name(split),
        )
    axes.set_xlabel("ms per token of a request")
    axes.set_ylabel("output tokens per second, in all")
    axes.set_xscale("log")
    axes.set_yscale("log")
    if axes.lines:
        axes.legend(fontsize=8)
