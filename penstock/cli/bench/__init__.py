"""`penstock bench`: how fast an engine is, each question a file."""

from __future__ import annotations

from typing import Any

from penstock.cli.bench import latency, serve, startup, throughput
from penstock.cli.common import Subparsers


def add_parser(subparsers: Subparsers[Any]) -> None:
    help = "Measure throughput, latency, startup or a server."
    parser = subparsers.add_parser("bench", help=help, description=help, allow_abbrev=False)
    kinds = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for benchmark in (throughput, latency, startup, serve):
        benchmark.add_parser(kinds)
