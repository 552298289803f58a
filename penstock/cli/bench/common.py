"""Shared by the benchmarks: flags, running a workload once, and the report."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import penstock
from penstock.cli.bench.workloads import (
    NAMES,
    Shape,
    Workload,
    named_workload,
    random_workload,
)
from penstock.cli.collect_env import package_version
from penstock.cli.common import check
from penstock.config.cli import add_engine_arguments, engine_options_from_args
from penstock.protocol.adapter import LoRARequest
from penstock.protocol.errors import ConfigError, RequestFault
from penstock.protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from penstock.llm import LLM

DEFAULT_LEN = 128


def add_batch_arguments(
    parser: argparse.ArgumentParser,
    count_flag: str,
    count_help: str,
    *,
    default_count: int,
    num_iters: int,
    warmup: int,
) -> None:
    """Add the flags of a batch benchmark.

    They are ``--workload``, or lengths and a number of requests (`count_flag`), then the flags of
    the measurement and the engine.
    """
    parser.add_argument(
        "--workload", choices=NAMES, help="Reference workload; not with lengths and counts."
    )
    parser.add_argument(
        count_flag,
        dest="num_requests",
        type=positive_int,
        metavar="N",
        help=f"{count_help} (default: {default_count})",
    )
    for flag, what in (("--input-len", "Prompt"), ("--output-len", "Output")):
        parser.add_argument(
            flag,
            type=positive_int,
            metavar="N",
            help=f"{what} tokens per request (default: {DEFAULT_LEN})",
        )
    parser.set_defaults(default_num_requests=default_count)
    add_run_arguments(parser, num_iters=num_iters, warmup=warmup)
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="Write a torch profiler trace of one more run (open it with https://ui.perfetto.dev) "
        "and print where the time went.",
    )
    add_engine_arguments(parser)


def add_run_arguments(parser: argparse.ArgumentParser, *, num_iters: int, warmup: int) -> None:
    """Add the flags for the number of runs and the JSON report."""
    parser.add_argument(
        "--num-iters",
        type=positive_int,
        default=num_iters,
        metavar="N",
        help="Measured runs (default: %(default)s)",
    )
    parser.add_argument(
        "--num-iters-warmup",
        type=natural_int,
        default=warmup,
        metavar="N",
        help="Warm-up runs, not measured (default: %(default)s)",
    )
    add_json_argument(parser)


def add_json_argument(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--json",
        "--output-json",
        metavar="FILE",
        help="Also write the report as JSON. With -, JSON goes to standard output and the table to "
        "standard error.",
    )


def positive_int(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def natural_int(text: str) -> int:
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return number


def benchmark_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine options from the flags, with prefix caching off by default.

    Every run sends the same prompts, so a warm prefix cache would change the result.
    """
    return {"enable_prefix_caching": False, **engine_options_from_args(args)}


def workload_from_args(args: argparse.Namespace) -> Workload:
    given = {
        "num_requests": args.num_requests,
        "input_len": args.input_len,
        "output_len": args.output_len,
    }
    if args.workload is not None:
        if extra := [name for name, value in given.items() if value is not None]:
            raise ConfigError(
                f"workload {args.workload} fixes lengths and counts: drop {', '.join(extra)}"
            )
        return named_workload(args.workload)
    return random_workload(
        Shape(
            num_requests=args.num_requests or args.default_num_requests,
            input_len=args.input_len or DEFAULT_LEN,
            output_len=args.output_len or DEFAULT_LEN,
        )
    )


def params_for(
    llm: LLM, args: argparse.Namespace, workload: Workload
) -> list[SamplingParams] | None:
    """Return the workload's sampling parameters, or None for a pooling model."""
    if llm.frontend.pooling is None:
        return workload.sampling_params(detokenize=llm.frontend.tokenizer is not None)
    if args.output_len is not None:
        raise ConfigError("output_len is for models that generate, and this one pools: drop it")
    return None


def timed_run(
    llm: LLM,
    workload: Workload,
    params: list[SamplingParams] | None,
    adapters: Sequence[LoRARequest | None] | None = None,
) -> float:
    """Return the seconds to run all requests at once, with the adapter of each.

    Raises `RequestFault` on missing tokens.
    """
    prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
    start = time.perf_counter()
    if params is None:
        vectors = llm.encode(prompts, use_tqdm=False, lora_request=adapters)
        elapsed = time.perf_counter() - start
        for vector in vectors:
            if vector.error is not None:
                raise RequestFault(f"request {vector.request_id} failed: {vector.error}")
        return elapsed
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
    elapsed = time.perf_counter() - start
    for output, wanted in zip(outputs, params, strict=True):
        if (got := len(check(output).outputs[0].token_ids)) != wanted.max_tokens:
            raise RequestFault(
                f"request {output.request_id} gave {got} tokens instead of {wanted.max_tokens}: "
                "lengths beyond max_model_len?"
            )
    return elapsed


def profile_run(
    args: argparse.Namespace,
    llm: LLM,
    workload: Workload,
    params: list[SamplingParams] | None,
    adapters: Sequence[LoRARequest | None] | None = None,
) -> None:
    """Run once more under torch's profiler if ``--profile`` is given."""
    if args.profile is None:
        return
    import torch
    from torch.profiler import ProfilerActivity

    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities) as profile:
        elapsed = timed_run(llm, workload, params, adapters)
    profile.export_chrome_trace(args.profile)
    averages = profile.key_averages()
    if on_gpu:
        busy = sum(item.self_device_time_total for item in averages) / 1e6
        share = busy / elapsed
        print(f"{elapsed:.3f} s, device busy {busy:.3f} s ({share:.0%})", file=sys.stderr)
    column = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    print(averages.table(sort_by=column, row_limit=25, max_name_column_width=60), file=sys.stderr)


def spread(values: list[float]) -> dict[str, float]:
    """Mean and percentiles of a measurement."""
    ordered = sorted(values)
    return {
        "mean": sum(ordered) / len(ordered),
        "min": ordered[0],
        "p50": percentile(ordered, 0.5),
        "p90": percentile(ordered, 0.9),
        "p99": percentile(ordered, 0.99),
        "max": ordered[-1],
    }


def percentile(ordered: list[float], share: float) -> float:
    """The percentile `share` (0 to 1) of sorted values, with linear interpolation."""
    place = share * (len(ordered) - 1)
    below, above = math.floor(place), math.ceil(place)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summarize_drafts(
    num_drafts: int, num_draft_tokens: int, num_accepted_tokens: int
) -> dict[str, Any]:
    """What speculative decoding did, from the counts of a run that verified drafts."""
    return {
        "num_drafts": num_drafts,
        "num_draft_tokens": num_draft_tokens,
        "num_accepted_tokens": num_accepted_tokens,
        "draft_acceptance_rate": num_accepted_tokens / num_draft_tokens,
        "mean_acceptance_length": 1 + num_accepted_tokens / num_drafts,
    }


def describe_drafts(summary: Mapping[str, Any]) -> str:
    return (
        f"{summary['num_accepted_tokens']} of {summary['num_draft_tokens']} accepted, "
        f"mean acceptance length {summary['mean_acceptance_length']:.2f}"
    )


def drafts_of_runs(llm: LLM) -> dict[str, Any]:
    """The drafts of all runs since the engine started, warm-up included; {} if there were none."""
    stats = llm.engine.speculation_stats()
    if stats is None or stats.num_drafts == 0:
        return {}
    return summarize_drafts(stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens)


def peak_memory_mib() -> float | None:
    """Peak resident memory of this process, or None if the system does not report it."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def report(
    benchmark: str, args: argparse.Namespace, setting: dict[str, Any], results: dict[str, Any]
) -> None:
    """Print the table, and write JSON as ``--json`` says."""
    document = {
        "benchmark": benchmark,
        "penstock": penstock.__version__,
        "torch": package_version("torch"),
        **setting,
        **results,
    }
    write_report(_table({**setting, **results}), document, args.json)


def write_report(table: str, document: dict[str, Any], json_target: str | None) -> None:
    """Print the table. Write `document` to a file, or to standard output for ``-``."""
    print(table, file=sys.stderr if json_target == "-" else sys.stdout)
    text = json.dumps(document, indent=2)
    if json_target == "-":
        print(text)
    elif json_target is not None:
        try:
            Path(json_target).write_text(text + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {json_target}: {error.strerror}") from error


def _table(rows: dict[str, Any]) -> str:
    """Format one line per number. A spread has all of its columns on one line."""
    width = max(map(len, rows))
    lines = []
    for name, value in rows.items():
        match value:
            case dict():
                shown = "  ".join(f"{key} {_number(item)}" for key, item in value.items()) or "none"
            case list() | None:
                continue  # single measurements are only in the JSON
            case _:
                shown = _number(value)
        lines.append(f"{name:<{width}}  {shown}")
    return "\n".join(lines)


def _number(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
