"""`penstock bench throughput`: runs all requests at once, measures tokens or texts per second."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from penstock.cli.bench.common import (
    add_batch_arguments,
    benchmark_options,
    params_for,
    peak_memory_mib,
    profile_run,
    report,
    timed_run,
    workload_from_args,
)
from penstock.cli.bench.workloads import Workload
from penstock.cli.common import open_llm

HELP = (
    "Measure tokens per second, or with a pooling model texts per second, with all requests sent "
    "at once. Prefix caching is off by default."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_batch_arguments(
        parser, "--num-prompts", "Requests sent at once", default_count=16, num_iters=1, warmup=0
    )


def run(args: argparse.Namespace) -> int:
    options = benchmark_options(args)
    workload = workload_from_args(args)
    with open_llm(options) as llm:
        params = params_for(llm, args, workload)
        for _ in range(args.num_iters_warmup):
            timed_run(llm, workload, params)
        times = [timed_run(llm, workload, params) for _ in range(args.num_iters)]
        profile_run(args, llm, workload, params)
    setting = {"workload": workload.name, "options": options}
    results = summarize_pooling if params is None else summarize
    report("throughput", args, setting, results(workload, times))
    return 0


def summarize(workload: Workload, times: list[float]) -> dict[str, Any]:
    """Compute the rates of the median run."""
    elapsed = statistics.median(times)
    num_output_tokens = sum(workload.output_lens)
    return {
        "num_requests": len(workload.prompts),
        "num_input_tokens": workload.num_input_tokens,
        "num_output_tokens": num_output_tokens,
        "elapsed_s": elapsed,
        "requests_per_s": len(workload.prompts) / elapsed,
        "output_tokens_per_s": num_output_tokens / elapsed,
        "total_tokens_per_s": (workload.num_input_tokens + num_output_tokens) / elapsed,
        "peak_memory_mib": peak_memory_mib(),
        "iterations_s": times,
    }


def summarize_pooling(workload: Workload, times: list[float]) -> dict[str, Any]:
    """Compute the rates of the median run of a pooling model. Every prompt is one text."""
    elapsed = statistics.median(times)
    return {
        "num_texts": len(workload.prompts),
        "num_tokens": workload.num_input_tokens,
        "elapsed_s": elapsed,
        "texts_per_s": len(workload.prompts) / elapsed,
        "tokens_per_s": workload.num_input_tokens / elapsed,
        "peak_memory_mib": peak_memory_mib(),
        "iterations_s": times,
    }
