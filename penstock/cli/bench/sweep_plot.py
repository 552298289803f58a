"""Plots a sweep: latency against throughput, and the Pareto front. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # without pyplot: no display, no global state

from penstock.cli.bench.sweep import COLUMNS, LOAD_NAMES

FRONT = "#c8102e"


def plot_sweep(rows: Sequence[Mapping[str, Any]], best: Sequence[int], path: Path) -> None:
    """Draw the rows of a sweep as a PNG. Rows that differ only in their load are one line."""
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        names = [name for name in row if name not in COLUMNS and name not in LOAD_NAMES]
        label = ", ".join(f"{name}={row[name]}" for name in names)
        lines.setdefault(label, []).append(row)
    figure = Figure(figsize=(14, 5), layout="constrained")
    axes = figure.subplots(1, 3)
    for plot, (title, column) in zip(
        axes, (("Time to first token", "ttft_ms"), ("Request latency", "e2el_ms")), strict=False
    ):
        for label, line in lines.items():
            for statistic, style in (("median", "o-"), ("p99", "x--")):
                points = [
                    (row["output_throughput"], row[f"{column}_{statistic}"])
                    for row in line
                    if row["output_throughput"] and row[f"{column}_{statistic}"] is not None
                ]
                if points:
                    name = f"{label} {statistic}".strip()
                    plot.plot(*zip(*sorted(points), strict=True), style, label=name)
        plot.set(title=title, xlabel="output tokens/s", ylabel="ms")
        plot.set_ylim(bottom=0)
        plot.grid(alpha=0.3)
        if plot.has_data():
            plot.legend(fontsize=8)
    _draw_front(axes[2], rows, best)
    figure.savefig(path, format="png", dpi=120)


def _draw_front(axes: Any, rows: Sequence[Mapping[str, Any]], best: Sequence[int]) -> None:
    points = {
        index: (1e3 / row["tpot_ms_median"], row["output_throughput"])
        for index, row in enumerate(rows)
        if row["output_throughput"] and row["tpot_ms_median"]
    }
    if points:
        axes.scatter(*zip(*points.values(), strict=True), s=24)
        front = sorted(points[index] for index in best)
        axes.plot(*zip(*front, strict=True), "o-", color=FRONT, label="Pareto front")
        for index in best:
            load = ", ".join(f"{n}={rows[index][n]}" for n in LOAD_NAMES if n in rows[index])
            axes.annotate(load, points[index], fontsize=7)
        axes.legend(fontsize=8)
    axes.set(title="Throughput and speed", xlabel="output tokens/s per user")
    axes.set_ylabel("output tokens/s in all")
    axes.grid(alpha=0.3)
