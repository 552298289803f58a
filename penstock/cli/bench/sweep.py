"""`penstock bench sweep`: runs `bench serve` over rates and options, and finds the best trade-offs.

Each run is a file in the output folder. A second sweep into the same folder continues the first.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.protocol.errors import ConfigError, RequestFault

LOAD_NAMES = ("request-rate", "max-concurrency")  # runs that differ in these alone are one line
COLUMNS = {  # of the summary: where they are in a report
    "completed": ("completed",),
    "failed": ("failed",),
    "request_throughput": ("request_throughput",),
    "output_throughput": ("output_throughput",),
    "total_token_throughput": ("total_token_throughput",),
    "ttft_ms_median": ("ttft_ms", "median"),
    "ttft_ms_p99": ("ttft_ms", "p99"),
    "tpot_ms_median": ("tpot_ms", "median"),
    "e2el_ms_median": ("e2el_ms", "median"),
    "e2el_ms_p99": ("e2el_ms", "p99"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o",
        "--output-dir",
        type=Path,
        required=True,
        metavar="DIR",
        help="Folder for the results. If it has some, only what is missing is run.",
    )
    parser.add_argument(
        "--vary",
        nargs="+",
        type=values_of,
        default=[],
        metavar="NAME=V1,V2",
        help="Flags of bench serve and their values, such as request-rate=1,2,4,inf. Every "
        "combination is run.",
    )
    parser.add_argument(
        "--serve",
        metavar="TEXT",
        help="Arguments of penstock serve. Starts a server for each combination of --vary-serve, "
        "instead of measuring one that runs.",
    )
    parser.add_argument(
        "--vary-serve",
        nargs="+",
        type=values_of,
        default=[],
        metavar="NAME=V1,V2",
        help="Flags of penstock serve and their values, such as max-num-seqs=64,256.",
    )
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="After --: flags of bench serve.")


def values_of(text: str) -> tuple[str, list[str]]:
    name, is_pair, values = text.partition("=")
    if not is_pair or not name or not all(values.split(",")):
        raise argparse.ArgumentTypeError(f"must look like NAME=V1,V2, got {text}")
    return name.removeprefix("--"), values.split(",")


def combinations(varied: Sequence[tuple[str, list[str]]]) -> list[dict[str, str]]:
    """Every combination of the values. Without any, the empty one."""
    names = [name for name, _ in varied]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"{min(twice)} is varied twice: give all of its values at once")
    return [
        dict(zip(names, chosen, strict=True))
        for chosen in itertools.product(*(values for _, values in varied))
    ]


def as_flags(chosen: Mapping[str, str]) -> list[str]:
    return [part for name, value in chosen.items() for part in (f"--{name}", value)]


def run(args: argparse.Namespace) -> int:
    if args.vary_serve and args.serve is None:
        raise ConfigError("--vary-serve needs --serve: it varies the server that the sweep starts")
    loads, servers = combinations(args.vary), combinations(args.vary_serve)
    for load in loads:  # before anything runs: raises for flags that are wrong
        parse_serve_flags([*args.flags, *as_flags(load)])
    make_folder(args.output_dir)
    rows = []
    for server in servers:
        missing = [load for load in loads if not has_result(args, server, load)]
        if missing:
            with running_server(args.serve, server) as url:
                for load in missing:
                    measure(args, server, load, url)
        rows += [row_of(args, server, load) for load in loads]
    best = pareto_front(rows)
    write_summary(args.output_dir, rows, best)
    print(render(rows, best))
    return 0


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {path}: {error.strerror}") from error


def parse_serve_flags(flags: Sequence[str]) -> argparse.Namespace:
    from penstock.cli.main import build_parser

    return build_parser().parse_args(["bench", "serve", *flags])


# -- one run


def setting_of(
    args: argparse.Namespace, server: Mapping[str, str], load: Mapping[str, str]
) -> dict[str, Any]:
    """What makes a run what it is. It is kept in its result."""
    return {"flags": args.flags, "serve": args.serve, "server": dict(server), "load": dict(load)}


def result_path(folder: Path, server: Mapping[str, str], load: Mapping[str, str]) -> Path:
    parts = [f"{name}={value}" for name, value in (*server.items(), *load.items())]
    name = "_".join(parts) or "run"
    return folder / "".join(c if c.isalnum() or c in "=_.-" else "-" for c in f"{name}.json")


def read_result(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}; delete it to run it again") from error
    return document if isinstance(document, dict) else {}


def has_result(
    args: argparse.Namespace, server: Mapping[str, str], load: Mapping[str, str]
) -> bool:
    """Whether this run is done. Raises `ConfigError` if its file is of other flags."""
    path = result_path(args.output_dir, server, load)
    if (document := read_result(path)) is None:
        return False
    if document.get("sweep") != setting_of(args, server, load):
        raise ConfigError(
            f"{path} is a result of other flags: choose another --output-dir, or delete it"
        )
    return True


def measure(
    args: argparse.Namespace, server: Mapping[str, str], load: Mapping[str, str], url: str | None
) -> None:
    """Run `bench serve` and keep its report, whole or not at all."""
    from penstock.cli.bench import serve

    path = result_path(args.output_dir, server, load)
    part = path.with_suffix(".part")
    flags = [*args.flags, *as_flags(load), "--json", str(part)]
    if url is not None:
        flags += ["--base-url", url]
    print(f"-- {path.stem}", file=sys.stderr)
    serve.run(parse_serve_flags(flags))
    document = json.loads(part.read_bytes()) | {"sweep": setting_of(args, server, load)}
    part.write_text(json.dumps(document, indent=2) + "\n")
    part.replace(path)


@contextlib.contextmanager
def running_server(arguments: str | None, chosen: Mapping[str, str]) -> Iterator[str | None]:
    """Start `penstock serve` on a socket of its own. Yields its URL; None: another is measured."""
    if arguments is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="penstock-sweep-") as folder:
        socket_path = Path(folder) / "api"
        command = [sys.executable, "-m", "penstock", "serve", *shlex.split(arguments)]
        command += [*as_flags(chosen), "--uds", str(socket_path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("Penstock serves"):
                    break
            else:
                raise RequestFault(f"the server did not start: {shlex.join(command)}")
            yield f"unix://{socket_path}"
        finally:
            process.terminate()
            process.wait()


# -- the summary


def row_of(
    args: argparse.Namespace, server: Mapping[str, str], load: Mapping[str, str]
) -> dict[str, Any]:
    document = read_result(result_path(args.output_dir, server, load))
    assert document is not None
    row: dict[str, Any] = {**server, **load}
    for name, place in COLUMNS.items():
        value: Any = document
        for part in place:
            value = value.get(part) if isinstance(value, dict) else None
        row[name] = value
    return row


def pareto_front(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """The rows that no other row beats in both: output tokens per second, in all and per user."""
    points = [
        (index, row["output_throughput"], 1e3 / row["tpot_ms_median"])
        for index, row in enumerate(rows)
        if row["output_throughput"] and row["tpot_ms_median"]
    ]
    return [
        index
        for index, total, per_user in points
        if not any(
            (t >= total and p >= per_user and (t, p) != (total, per_user)) for _, t, p in points
        )
    ]


def write_summary(folder: Path, rows: Sequence[dict[str, Any]], best: Sequence[int]) -> None:
    document = {"benchmark": "sweep", "rows": list(rows), "pareto": list(best)}
    (folder / "sweep.json").write_text(json.dumps(document, indent=2) + "\n")
    with (folder / "sweep.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    try:
        from penstock.cli.bench.sweep_plot import plot_sweep
    except ImportError:
        print("no plot without matplotlib: pip install 'penstock[plot]'", file=sys.stderr)
        return
    plot_sweep(rows, best, folder / "sweep.png")


def render(rows: Sequence[Mapping[str, Any]], best: Sequence[int]) -> str:
    """Format the table. * marks the Pareto front."""
    names = list(rows[0])
    cells = [names] + [[_cell(row[name]) for name in names] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    lines = []
    for index, line in enumerate(cells):
        mark = "*" if index - 1 in best and index else " "
        shown = "  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True))
        lines.append(f"{mark} {shown}")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
