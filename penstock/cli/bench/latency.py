"""`penstock bench latency`: measures one batch: time to first token and time per token."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from penstock.cli.bench.common import (
    add_batch_arguments,
    benchmark_options,
    drafts_of_runs,
    params_for,
    peak_memory_mib,
    profile_run,
    report,
    spread,
    timed_run,
    workload_from_args,
)
from penstock.cli.bench.workloads import Workload
from penstock.cli.common import open_llm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_batch_arguments(
        parser, "--batch-size", "Requests in the batch", default_count=1, num_iters=5, warmup=1
    )


def run(args: argparse.Namespace) -> int:
    options = benchmark_options(args)
    workload = workload_from_args(args)
    first_only = dataclasses.replace(workload, output_lens=[1] * len(workload.prompts))
    with open_llm(options) as llm:
        pools = llm.frontend.pooling is not None
        parts = [workload] if pools else [first_only, workload]
        runs = [(part, params_for(llm, args, part)) for part in parts]
        measured = [
            tuple(timed_run(llm, part, params) for part, params in runs)
            for _ in range(args.num_iters_warmup + args.num_iters)
        ][args.num_iters_warmup :]
        drafts = drafts_of_runs(llm)
        profile_run(args, llm, *runs[-1])
    *first, total = ([times[i] * 1e3 for times in measured] for i in range(len(runs)))
    setting = {"workload": workload.name, "options": options}
    results = summarize(workload, first[0], total) if first else summarize_pooling(workload, total)
    report("latency", args, setting, results | drafts)
    return 0


def summarize(workload: Workload, first_ms: list[float], total_ms: list[float]) -> dict[str, Any]:
    """Summarize the iterations. The number of steps is the batch's longest output."""
    num_steps = max(workload.output_lens)
    results: dict[str, Any] = {
        "batch_size": len(workload.prompts),
        "num_input_tokens": workload.num_input_tokens,
        "num_output_tokens": sum(workload.output_lens),
        "time_to_first_token_ms": spread(first_ms),
        "total_ms": spread(total_ms),
    }
    if num_steps > 1:
        results["ms_per_token"] = spread(
            [
                (total - first) / (num_steps - 1)
                for first, total in zip(first_ms, total_ms, strict=True)
            ]
        )
    return results | {"peak_memory_mib": peak_memory_mib()}


def summarize_pooling(workload: Workload, total_ms: list[float]) -> dict[str, Any]:
    """Summarize the iterations of a pooling model. Every prompt is one text."""
    return {
        "batch_size": len(workload.prompts),
        "num_tokens": workload.num_input_tokens,
        "total_ms": spread(total_ms),
        "peak_memory_mib": peak_memory_mib(),
    }
