"""`penstock bench startup`: measures the time from a fresh process to its first token."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from penstock.cli.bench.common import add_run_arguments, report
from penstock.cli.common import check, open_llm
from penstock.config.cli import add_engine_arguments, engine_options_from_args
from penstock.protocol.errors import EngineDeadError
from penstock.protocol.sampling import SamplingParams

PROMPT = "The capital of France is"
PROMPT_TOKEN_IDS = [1, 2, 3, 4]  # without a tokenizer
MARK = "penstock-startup "  # begins the line that the measured process prints at its first token


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, num_iters=3, warmup=1)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    options = engine_options_from_args(args)
    for _ in range(args.num_iters_warmup):
        measure_once(options)
    measured = [measure_once(options) for _ in range(args.num_iters)]
    medians = {name: statistics.median(run[name] for run in measured) for name in measured[0]}
    report("startup", args, {"options": options}, medians | {"iterations": measured})
    return 0


def measure_once(options: dict[str, Any]) -> dict[str, float]:
    """Start a process and wait for its first token. Returns the time of each phase."""
    probe = f"from {__name__} import main; main()"
    command = [sys.executable, "-c", probe, json.dumps(options)]
    with tempfile.TemporaryFile("w+") as stderr:
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(MARK):
                    elapsed = time.perf_counter() - start
                    parts: dict[str, float] = json.loads(line.removeprefix(MARK))
                    process.stdout.read()  # wait for a clean shutdown
                    return {"first_token_s": elapsed, **parts}
        stderr.seek(0)
        lines = stderr.read().strip().splitlines() or ["it said nothing"]
        raise EngineDeadError(
            f"the measured process ended with code {process.returncode} before its first token: "
            f"{lines[-1]}"
        )


def main() -> None:
    """The measured process. Its only argument is the engine options as JSON."""
    options = json.loads(sys.argv[1])
    start = time.perf_counter()
    import penstock.llm  # noqa: F401  imports torch

    imported = time.perf_counter()
    with open_llm(options) as llm:
        loaded = time.perf_counter()
        with_text = not options.get("skip_tokenizer_init")
        prompt = PROMPT if with_text else {"prompt_token_ids": PROMPT_TOKEN_IDS}
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=with_text)
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        check(output)
        parts = {
            "import_s": imported - start,
            "load_s": loaded - imported,
            "generate_s": time.perf_counter() - loaded,
        }
        print(MARK + json.dumps(parts), flush=True)
