"""Plots a run: a timeline of the requests and the distributions of their latencies."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.bench.common import percentile
from penstock.cli.bench.serve_report import describe_load
from penstock.protocol.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WAIT, DECODE, FAILED, MARK = "#f2a65a", "#3b7ea1", "#c8102e", "#333333"
MAX_ROWS_SHOWN_APART = 60  # up to this, the timeline's bars have gaps between them


def require_matplotlib() -> None:
    """Raise `ConfigError` if matplotlib is missing. Called before the run."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'penstock[plot]'") from error


def plot(document: Mapping[str, Any], path: Path) -> None:
    """Plot a report of `penstock bench serve` as a PNG."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    done = [row for row in document["requests"] if "error" not in row]
    figure = Figure(figsize=(12, 8), layout="constrained")
    grid = figure.add_gridspec(2, 3, height_ratios=[1.5, 1])
    figure.suptitle(_title(document), fontsize=11, linespacing=1.5)
    _timeline(figure.add_subplot(grid[0, :]), document["requests"], document["duration_s"])
    if "ttft_ms" in document:
        first = figure.add_subplot(grid[1, 0])
        _distribution(first, "Time to first token", [r["ttft_ms"] for r in done], WAIT)
        itls = [itl for row in done for itl in row["itls_ms"]]
        _distribution(figure.add_subplot(grid[1, 1]), "Inter-token latency", itls, DECODE)
        title, counts = "Output tokens a second", _output_tokens(done)
    else:
        latencies = [(row["end_s"] - row["start_s"]) * 1e3 for row in done]
        _distribution(figure.add_subplot(grid[1, :2]), "Latency", latencies, WAIT)
        title, counts = "Texts a second", [(row["end_s"], 1.0) for row in done]
    _rate(figure.add_subplot(grid[1, 2]), title, counts, done, document["duration_s"])
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _title(document: Mapping[str, Any]) -> str:
    failed = f", {document['failed']} failed" if document["failed"] else ""
    rates = f"{document['request_throughput']:.2f} requests/s"
    if "output_throughput" in document:
        rates += f", {document['output_throughput']:.0f} output tokens/s"
    else:
        rates += f", {document['total_token_throughput']:.0f} tokens/s"
    if "mean_acceptance_length" in document:
        rates += f", mean acceptance length {document['mean_acceptance_length']:.2f}"
    return (
        f"{document['model']}: {document['workload']}, {describe_load(document)}\n"
        f"{document['completed']} completed{failed} in {document['duration_s']:.1f} s, {rates}"
    )


def _timeline(axes: Axes, rows: Sequence[Mapping[str, Any]], duration_s: float) -> None:
    """Draw a bar per request: time to first token, then decoding. Failures are crosses."""
    height = 0.8 if len(rows) <= MAX_ROWS_SHOWN_APART else 1.0
    ordered = sorted(rows, key=lambda row: float(row["start_s"]))
    done = [(y, row) for y, row in enumerate(ordered) if "error" not in row]
    failed = [(y, row) for y, row in enumerate(ordered) if "error" in row]
    ys = [y for y, _ in done]
    starts = [row["start_s"] for _, row in done]
    waits = [
        row["ttft_ms"] / 1e3 if "ttft_ms" in row else row["end_s"] - row["start_s"]
        for _, row in done
    ]
    firsts = [start + wait for start, wait in zip(starts, waits, strict=True)]
    decodes = [row["end_s"] - first for (_, row), first in zip(done, firsts, strict=True)]
    streams = any("ttft_ms" in row for _, row in done)
    until = "until the first token" if streams else "until the answer"
    axes.barh(ys, waits, height, left=starts, color=WAIT, label=until)
    if streams:
        axes.barh(ys, decodes, height, left=firsts, color=DECODE, label="tokens coming")
    if failed:
        failed_starts = [row["start_s"] for _, row in failed]
        failed_ys = [y for y, _ in failed]
        axes.scatter(failed_starts, failed_ys, marker="x", s=24, color=FAILED, label="failed")
    axes.set(xlim=(0, duration_s), ylim=(len(rows) - 0.5, -0.5))
    axes.set(title="Requests", xlabel="seconds from the start", ylabel="in the order sent")
    above = (1.0, 1.0)  # above the axes, where there are no bars
    axes.legend(loc="lower right", bbox_to_anchor=above, ncols=3, fontsize=9, frameon=False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _distribution(axes: Axes, title: str, values_ms: Sequence[float], color: str) -> None:
    """Draw a histogram with the median and the 99th percentile."""
    axes.set(title=title, xlabel="ms")
    axes.set_yticks([])
    if not values_ms:
        axes.text(0.5, 0.5, "nothing measured", ha="center", transform=axes.transAxes)
        return
    ordered = sorted(values_ms)
    median, p99 = percentile(ordered, 0.5), percentile(ordered, 0.99)
    # A single outlier must not squeeze the rest into one bar: outliers go into the last one.
    end = min(ordered[-1], max(3 * p99, 1e-3))
    shown = [min(value, end) for value in values_ms]
    axes.hist(shown, bins=40, color=color)
    for value, name, style in ((median, "median", "-"), (p99, "p99", "--")):
        axes.axvline(value, color=MARK, linestyle=style, label=f"{name} {value:.1f} ms")
    axes.set_xlim(left=0)
    axes.legend(fontsize=9, framealpha=0.9)


def _output_tokens(done: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return the time and the tokens of each chunk. Tokens are split evenly over the chunks."""
    counts = []
    for row in done:
        at = row["start_s"] + row["ttft_ms"] / 1e3
        times = [at]
        for itl in row["itls_ms"]:
            at += itl / 1e3
            times.append(at)
        counts += [(time, row["num_output_tokens"] / len(times)) for time in times]
    return counts


def _rate(
    axes: Axes,
    title: str,
    counts: Sequence[tuple[float, float]],
    done: Sequence[Mapping[str, Any]],
    duration_s: float,
) -> None:
    """Draw the rate per second and the requests in flight over the run."""
    num_bins = 30
    width = duration_s / num_bins
    bins = [0.0] * num_bins
    for time, count in counts:
        bins[min(int(time / width), num_bins - 1)] += count
    edges = [index * width for index in range(num_bins + 1)]
    axes.stairs([count / width for count in bins], edges, fill=True, color=DECODE, alpha=0.5)
    axes.set(title=title, xlabel="seconds from the start", xlim=(0, duration_s))
    axes.set_ylim(bottom=0)
    changes = sorted([(row["start_s"], 1) for row in done] + [(row["end_s"], -1) for row in done])
    in_flight = axes.twinx()
    in_flight.step(
        [time for time, _ in changes],
        list(itertools.accumulate(change for _, change in changes)),
        where="post",
        color=MARK,
        linewidth=1,
    )
    in_flight.set_ylim(bottom=0)
    in_flight.set_ylabel("requests in flight (line)")
