"""`penstock bench`: how fast an engine is, each question a file."""

from __future__ import annotations

from penstock.cli.bench import latency, serve, startup, throughput

HELP = "Measure throughput, latency, startup or a server."
BENCHMARKS = (throughput, latency, startup, serve)
