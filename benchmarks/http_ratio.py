"""The cost of HTTP streaming: one workload offline and over HTTP, alternating, and their ratio.

    python benchmarks/http_ratio.py --workload cpu_c --rounds 3

Each round runs the workload offline in a new engine, and then through a server. Both are warmed up
and have prefix caching off. The server, its engine and the client share the machine, as on a
laptop. Flags after ``--`` are engine options of both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parents[1]
PENSTOCK = [sys.executable, "-m", "penstock"]
ENGINE = ["--no-enable-prefix-caching", "--log-level", "warning"]


class Running(NamedTuple):
    """A server that is ready."""

    url: str
    pid: int


@contextlib.contextmanager
def serving(options: list[str], checkout: Path = HERE) -> Iterator[Running]:
    """A server of the code of a checkout."""
    command = [*PENSTOCK, "serve", "--host", "127.0.0.1", "--port", "0", *ENGINE, *options]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("  API "):
                yield Running(line.split()[1], process.pid)
                return
        raise SystemExit(f"the server did not start: {' '.join(command)}")
    finally:
        process.terminate()
        process.wait()


def measure(*arguments: str) -> Any:
    """The JSON report of a benchmark."""
    command = [*PENSTOCK, "bench", *arguments, "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", default="cpu_c")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("engine_options", nargs="*", metavar="ENGINE OPTION")
    args = parser.parse_args()
    workload = ["--workload", args.workload]
    ratios = []
    for number in range(1, args.rounds + 1):
        offline = measure(
            "throughput", *workload, "--num-iters-warmup", "1", *ENGINE, *args.engine_options
        )
        with serving(args.engine_options) as server:
            warm = ["--num-warmups", str(offline["num_requests"])]
            online = measure("serve", "--base-url", server.url, *workload, *warm)
        if online["failed"] or online["total_output_tokens"] != offline["num_output_tokens"]:
            raise SystemExit(f"the server did less work: {online['errors']}")
        ratios.append(online["output_throughput"] / offline["output_tokens_per_s"])
        print(
            f"round {number}: offline {offline['output_tokens_per_s']:.1f} output tokens/s, "
            f"HTTP {online['output_throughput']:.1f}, ratio {ratios[-1]:.3f}, "
            f"TTFT median {online['ttft_ms']['median']:.0f} ms",
            flush=True,
        )
    print(f"{args.workload}: HTTP streaming reaches {statistics.median(ratios):.3f} of offline")


if __name__ == "__main__":
    main()
