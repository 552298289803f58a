"""`penstock bench`: measures an engine's performance. One module per benchmark."""

from __future__ import annotations

from penstock.cli.bench import latency, serve, startup, throughput

HELP = "Measure throughput, latency, startup or a server."
BENCHMARKS = (throughput, latency, startup, serve)
