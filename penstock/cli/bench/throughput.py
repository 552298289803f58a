"""`penstock bench throughput`: runs all requests at once, measures tokens or texts per second."""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from typing import Any

from penstock.cli.bench.common import (
    add_batch_arguments,
    benchmark_options,
    drafts_of_runs,
    params_for,
    peak_memory_mib,
    profile_run,
    report,
    timed_run,
    workload_from_args,
)
from penstock.cli.bench.workloads import Workload
from penstock.cli.common import open_llm
from penstock.config.lora_modules import LoRAModule, parse_lora_module
from penstock.protocol.adapter import LoRARequest
from penstock.protocol.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_batch_arguments(
        parser, "--num-prompts", "Requests sent at once", default_count=16, num_iters=1, warmup=0
    )
    parser.add_argument(
        "--lora-modules",
        nargs="+",
        type=lora_module,
        default=[],
        metavar="NAME=PATH",
        help="LoRA adapters. Each request runs with one of them or with the base model, at random "
        "(--seed). Turns on --enable-lora. A warm-up run loads them.",
    )


def lora_module(text: str) -> LoRAModule:
    try:
        return parse_lora_module(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def pick_adapters(
    modules: Sequence[LoRAModule], count: int, seed: int
) -> list[LoRARequest | None] | None:
    """Give each request one of the adapters or none, at random. None without adapters."""
    if not modules:
        return None
    rng = random.Random(f"models {seed}")
    adapters = [
        LoRARequest(module.name, number, module.path)
        for number, module in enumerate(modules, start=1)
    ]
    return [rng.choice([None, *adapters]) for _ in range(count)]


def run(args: argparse.Namespace) -> int:
    options = benchmark_options(args)
    if args.lora_modules:
        options = {"enable_lora": True, **options}
    workload = workload_from_args(args)
    with open_llm(options) as llm:
        params = params_for(llm, args, workload)
        seed = llm.config.model.seed
        adapters = pick_adapters(args.lora_modules, len(workload.prompts), seed)
        num_warmups = max(args.num_iters_warmup, 1) if adapters else args.num_iters_warmup
        for _ in range(num_warmups):
            timed_run(llm, workload, params, adapters)
        times = [timed_run(llm, workload, params, adapters) for _ in range(args.num_iters)]
        drafts = drafts_of_runs(llm)
        profile_run(args, llm, workload, params, adapters)
    setting: dict[str, Any] = {"workload": workload.name, "options": options}
    if adapters is not None:
        setting["num_lora_requests"] = sum(item is not None for item in adapters)
    results = summarize_pooling if params is None else summarize
    report("throughput", args, setting, results(workload, times) | drafts)
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
