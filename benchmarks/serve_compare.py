"""`penstock serve` of this checkout and of another: throughput, latency and CPU time over HTTP.

    python benchmarks/serve_compare.py --workload cpu_b --rounds 9 ../other-checkout

Both servers run all the while. Each round sends one workload to the one and then to the other, in
turn to this one first and last. The client is this checkout's for both. Printed are medians of the
rounds' ratios, in which load on the machine that lasts longer than a round does not show. CPU times
are those of the server and its engine. The other checkout needs its own C++ library
(CONTRIBUTING.md). Flags after the checkout and ``--`` are engine options of both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from pathlib import Path

from api_cost import cpu_time
from http_ratio import HERE, Running, measure, serving

MEASURES = {  # and whether more is better
    "output tokens/s": True,
    "TTFT, median, ms": False,
    "CPU time of the server, ms": False,
    "CPU time of its engine, ms": False,
}


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def run(server: Running, workload: list[str]) -> dict[str, float]:
    """What a server needs for a workload."""
    processes = [[server.pid], children_of(server.pid)]
    before = [sum(map(cpu_time, pids)) for pids in processes]
    report = measure("serve", "--base-url", server.url, *workload)
    spent = [sum(map(cpu_time, pids)) for pids in processes]
    if report["failed"]:
        raise SystemExit(f"requests failed: {report['errors']}")
    values = [report["output_throughput"], report["ttft_ms"]["median"]]
    values += [1e3 * (now - then) for now, then in zip(spent, before, strict=True)]
    return dict(zip(MEASURES, values, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--workload", default="cpu_b")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("engine_options", nargs="*", metavar="ENGINE OPTION")
    args = parser.parse_args()
    workload = ["--workload", args.workload]
    options = ["--no-spare-engine", *args.engine_options]
    rounds: list[dict[str, dict[str, float]]] = []
    with contextlib.ExitStack() as stack:
        checkouts = {"there": args.other.resolve(), "here": HERE}
        servers = {
            name: stack.enter_context(serving(options, path)) for name, path in checkouts.items()
        }
        for server in servers.values():
            run(server, workload)  # warms it up
        for number in range(args.rounds):
            order = list(servers) if number % 2 else list(reversed(servers))
            found = {name: run(servers[name], workload) for name in order}
            rounds.append(found)
            rates = (f"{name} {found[name]['output tokens/s']:.1f}" for name in servers)
            print(f"round {number + 1}: {', '.join(rates)} output tokens/s", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rounds, indent=1))
    print("| | there | here | here is faster by |\n|---|---|---|---|")
    for name, is_rate in MEASURES.items():
        there, here = ([found[column][name] for found in rounds] for column in servers)
        pairs = zip(here, there, strict=True)
        ratio = statistics.median(new / old if is_rate else old / new for new, old in pairs)
        medians = " | ".join(f"{statistics.median(values):.1f}" for values in (there, here))
        print(f"| {name} | {medians} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
