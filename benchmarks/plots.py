"""Draw the plots of docs/benchmarks.md from its tables: `python benchmarks/plots.py`.

Each plot's numbers are read from the page and kept in the file's description, by which a test knows
that the plot is current. Needs `pip install 'penstock[plot]'`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
FOLDER = ROOT / "docs" / "images"

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
OWN, OTHER = "#00796b", "#9aa5b1"
Table = dict[str, dict[str, float]]  # row -> column -> number


@dataclass(frozen=True)
class Plot:
    """Bars: a group for each label, and in it one for each series."""

    title: str
    axis: str
    series: dict[str, list[float]]
    labels: list[str]
    form: str
    colours: tuple[str, ...] = (OWN, OTHER)
    line: float | None = None  # across all groups, such as at 1x

    def description(self) -> str:
        return json.dumps({"labels": self.labels, "series": self.series})


# -- the tables of the page


def table(text: str, heading: str, column: str) -> Table:
    """The first table below the heading that has this column. Cells without a number are left out.

    A column whose name occurs twice is called after the one before it: "per second ratio".
    """
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    for block in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
        head, _, *rows = [
            [re.sub(r"[`*]", "", cell.strip()) for cell in line.strip().strip("|").split("|")]
            for line in block.splitlines()
        ]
        head = [
            name if head.count(name) == 1 else f"{before} {name}"
            for before, name in zip(["", *head], head, strict=False)
        ]
        if column in head:
            found = {name: zip(head[1:], cells, strict=True) for name, *cells in rows}
            return {
                name: {key: _number(cell) for key, cell in cells if NUMBER.match(cell)}
                for name, cells in found.items()
            }
    raise SystemExit(f"{PAGE} has no table with the column {column!r} below {heading!r}")


def _number(cell: str) -> float:
    match = NUMBER.match(cell)
    assert match is not None, cell
    return float(match[0].replace(",", ""))


# -- what is drawn


def cpu_peers(text: str) -> Plot:
    heading = "CPU: comparison with other engines"
    columns = {
        "transformers 5.22": ("transformers 5.22, float32", "Penstock to transformers"),
        "llama.cpp, Q4_1": ("llama.cpp, Q4_1", "ratio"),
        "vLLM for CPUs": ("vLLM for CPUs", "ratio"),
    }
    tables = {name: table(text, heading, column) for name, (column, _) in columns.items()}
    labels = [row for row in tables["vLLM for CPUs"] if row.startswith("cpu_")]
    series = {name: [tables[name][label][columns[name][1]] for label in labels] for name in columns}
    return Plot(
        "Two CPU cores, default model: Penstock's speed relative to other engines",
        "times as fast as",
        series,
        [
            label.replace(", ms", "").partition(", ")[0].replace(" time", ":\ntime")
            for label in labels
        ],
        "{:.1f}x",
        (OTHER, "#c9a66b", "#6b8fc9"),
        line=1,
    )


def gpu_vllm(text: str) -> Plot:
    """Shares of what the hardware allows, since the workloads have different units."""
    lines = table(text, "GPU: one H200", "floor")
    series: dict[str, list[float]] = {"Penstock": [], "vLLM 0.26": []}
    labels = []
    for row, numbers in lines.items():
        if "floor" not in numbers:
            continue
        labels.append(row.partition(",")[0])
        for name, values in series.items():
            ratio = numbers[name] / numbers["floor"]
            values.append(round(100 * (1 / ratio if ", ms " in row else ratio), 1))
    return Plot(
        "One H200: share of what the hardware allows (the floor)", "%", series, labels, "{:.0f}"
    )


def gpu_speculation(text: str) -> Plot:
    lines = table(text, "GPU: speculative decoding", "without drafts")
    series = {
        "with drafts": [numbers["ms per token"] for numbers in lines.values()],
        "without drafts": [numbers["without drafts"] for numbers in lines.values()],
    }
    labels = [f"{row} drafts" if row.endswith("right") else row for row in lines]
    title = "Qwen3-8B on an H200: time per token of one stream"
    return Plot(title, "ms, by number of streams", series, labels, "{:.2f}")


def gpu_embeddings(text: str) -> Plot:
    lines = table(text, "GPU: embeddings", "torch")
    series = {"Penstock": [numbers["ratio"] for numbers in lines.values()]}
    title = "Embeddings on an H200, 512 tokens a text: Penstock's speed relative to torch"
    return Plot(title, "times as fast as torch", series, list(lines), "{:.2f}x", line=1)


def cpu_embeddings(text: str) -> Plot:
    columns = {
        "sentences": "sentences per second ratio",
        "texts of 256 tokens": "256-token texts per second ratio",
    }
    lines = table(text, "CPU: embeddings", columns["sentences"])
    series = {
        name: [numbers[column] for numbers in lines.values()] for name, column in columns.items()
    }
    title = "all-MiniLM-L6-v2 on two CPU cores: speed relative to sentence-transformers"
    shades = (OWN, "#80cbc4")
    return Plot(title, "times as fast", series, list(lines), "{:.2f}x", shades, line=1)


PLOTS: dict[str, Callable[[str], Plot]] = {
    "benchmarks-cpu": cpu_peers,
    "benchmarks-gpu": gpu_vllm,
    "benchmarks-speculation": gpu_speculation,
    "benchmarks-embeddings-gpu": gpu_embeddings,
    "benchmarks-embeddings-cpu": cpu_embeddings,
}


# -- drawing


def draw(plot: Plot, path: Path) -> None:
    mpl.rcParams.update({"svg.hashsalt": "penstock", "font.size": 10})  # the same file every time
    num_groups, num_series = len(plot.labels), len(plot.series)
    figure = Figure(
        figsize=(8, 1.3 + num_groups * (0.16 + 0.22 * num_series)), layout="constrained"
    )
    axes = figure.add_subplot()
    thickness = 0.8 / num_series
    for index, (name, values) in enumerate(plot.series.items()):
        places = [group + (index - (num_series - 1) / 2) * thickness for group in range(num_groups)]
        colour = plot.colours[index]
        bars = axes.barh(places, values, thickness * 0.92, color=colour, label=name)
        axes.bar_label(bars, [plot.form.format(value) for value in values], padding=3, fontsize=8)
    axes.set_yticks(range(num_groups), plot.labels)
    axes.invert_yaxis()
    figure.suptitle(plot.title, x=0.01, ha="left", fontsize=11)
    _clean(axes, plot)
    metadata: dict[str, Any] = {"Description": plot.description(), "Date": None, "Creator": None}
    figure.savefig(path, metadata=metadata)


def _clean(axes: Axes, plot: Plot) -> None:
    axes.set_xlabel(plot.axis)
    axes.margins(x=0.09)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    if plot.line is not None:
        axes.axvline(plot.line, color="#444444", linewidth=0.8, linestyle=":")
    if len(plot.series) > 1:
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": len(plot.series)}
        axes.legend(frameon=False, fontsize=9, borderaxespad=0.2, **place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="(default: docs/images)")
    folder = parser.parse_args().folder
    for name, make in PLOTS.items():
        draw(make(PAGE.read_text()), folder / f"{name}.svg")


if __name__ == "__main__":
    main()
