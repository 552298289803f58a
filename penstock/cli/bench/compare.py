"""`penstock bench compare`: the numbers of two reports side by side."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.cli.bench.common import add_json_argument, write_report
from penstock.protocol.errors import ConfigError

# Settings, and numbers that say nothing about speed.
NOT_MEASURED = frozenset({"benchmark", "penstock", "torch", "seed", "num_warmups", "burstiness"})
HIGHER_IS_BETTER = ("throughput", "goodput", "per_second", "_rate", "good_share", "tokens_per")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, which in (("a", "first"), ("b", "second")):
        parser.add_argument(name, type=Path, metavar=f"{name.upper()}.json", help=f"The {which}.")
    parser.add_argument(
        "--threshold",
        type=float,
        metavar="PERCENT",
        help="Exit with code 1 if a throughput of B is lower, or a latency higher, by more.",
    )
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    first, second = read_report(args.a), read_report(args.b)
    if first["benchmark"] != second["benchmark"]:
        raise ConfigError(
            f"{args.a} is a report of bench {first['benchmark']}, {args.b} of bench "
            f"{second['benchmark']}: compare two of one kind"
        )
    rows = compare(first, second)
    if not rows:
        raise ConfigError(f"{args.a} and {args.b} have no number in common")
    differing = {
        name: [first.get(name), second.get(name)]
        for name in sorted(first.keys() | second.keys())
        if is_setting(name, first.get(name, second.get(name)))
        and first.get(name) != second.get(name)
    }
    worse = [row["name"] for row in rows if is_worse(row, args.threshold)]
    document = {"benchmark": "compare", "differs": differing, "numbers": rows, "worse": worse}
    write_report(render(rows, differing, worse), document, args.json)
    return 1 if worse else 0


def read_report(path: Path) -> dict[str, Any]:
    """Read a report that a benchmark wrote with --json. Raises `ConfigError`."""
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict) or "benchmark" not in document:
        raise ConfigError(f"{path} is no report: write one with penstock bench ... --json FILE")
    return document


def numbers_of(document: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The measured numbers, such as ("ttft_ms p99", 12.5)."""
    for name, value in document.items():
        if isinstance(value, dict) and not is_setting(name, value):
            for part, number in value.items():
                if isinstance(number, (int, float)):
                    yield f"{name} {part}", float(number)
        elif isinstance(value, (int, float)) and not is_setting(name, value):
            yield name, float(value)


def is_setting(name: str, value: Any) -> bool:
    if isinstance(value, dict):
        return not name.endswith(("_ms", "_s", "_per_second", "ms_per_token"))
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    settings = NOT_MEASURED | {"request_rate", "max_concurrency"}
    return not isinstance(value, list) and (not is_number or name in settings)


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per number that both have. `change` is a fraction of A; None if A is 0."""
    others = dict(numbers_of(second))
    return [
        {
            "name": name,
            "a": value,
            "b": others[name],
            "change": None if value == 0 else (others[name] - value) / value,
        }
        for name, value in numbers_of(first)
        if name in others
    ]


def is_worse(row: Mapping[str, Any], threshold: float | None) -> bool:
    if threshold is None or row["change"] is None:
        return False
    name = row["name"]
    if any(part in name for part in HIGHER_IS_BETTER):
        return bool(row["change"] < -threshold / 100)
    is_latency = ("_ms" in name or "ms_per" in name) and " " in name
    return is_latency and bool(row["change"] > threshold / 100)


def render(rows: list[dict[str, Any]], differing: Mapping[str, list[Any]], worse: list[str]) -> str:
    width = max(len(row["name"]) for row in rows)
    lines = [f"{name} differs: {a!r:.60}, {b!r:.60}" for name, (a, b) in differing.items()]
    lines += [""] if lines else []
    lines.append(f"{'':<{width}}{'A':>14}{'B':>14}{'change':>10}")
    for row in rows:
        change = "" if row["change"] is None else f"{row['change']:+.1%}"
        mark = "  worse" if row["name"] in worse else ""
        name, a, b = row["name"], row["a"], row["b"]
        lines.append(f"{name:<{width}}{a:>14.2f}{b:>14.2f}{change:>10}{mark}")
    return "\n".join(lines)
