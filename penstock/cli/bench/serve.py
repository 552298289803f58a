"""`penstock bench serve`: measures any OpenAI-compatible server from the client's side."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import penstock
from penstock.cli.bench.common import (
    DEFAULT_LEN,
    add_json_argument,
    natural_int,
    positive_int,
    write_report,
)
from penstock.cli.bench.prompts import (
    DEFAULT_NUM_PROMPTS,
    PromptSet,
    pick_models,
    prompts_from_args,
)
from penstock.cli.bench.workloads import NAMES
from penstock.cli.serve import run_in_event_loop
from penstock.protocol.errors import ConfigError

if TYPE_CHECKING:
    from penstock.cli.bench.http import HttpClient
    from penstock.cli.bench.load import Load, LoadResult
    from penstock.cli.bench.streams import Dialect

GOALS = ("ttft", "tpot", "e2el")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_server_arguments(parser.add_argument_group("server"))
    _add_prompt_arguments(parser.add_argument_group("prompts"))
    _add_load_arguments(parser.add_argument_group("load"))
    group = parser.add_argument_group("report")
    group.add_argument(
        "--goodput",
        nargs="+",
        type=goal,
        default=[],
        metavar="NAME:MS",
        help="Count requests that meet all of these SLOs (ms), such as ttft:500 tpot:50 e2el:5000.",
    )
    group.add_argument("--plot", type=Path, metavar="FILE", help="Also plot the run as a PNG.")
    add_json_argument(group)


def _add_server_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--base-url",
        required=True,
        metavar="URL",
        help="Server to measure, such as http://127.0.0.1:8000.",
    )
    group.add_argument(
        "--backend",
        choices=("openai", "openai-chat", "openai-embeddings"),
        default="openai",
        help="API to use: /v1/completions, /v1/chat/completions or /v1/embeddings "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--model", metavar="NAME", help="Model name (default: the first of /v1/models)"
    )
    group.add_argument(
        "--lora-modules",
        nargs="+",
        default=[],
        metavar="NAME",
        help="LoRA adapters that the server knows. Each request asks for one of them or for the "
        "model, at random.",
    )
    group.add_argument("--api-key", metavar="TEXT", help="API key, sent as a bearer token.")
    group.add_argument(
        "--timeout",
        type=positive_float,
        default=600.0,
        metavar="S",
        help="Timeout per request in seconds (default: %(default)s)",
    )
    group.add_argument(
        "--extra-body",
        type=json_object,
        default={},
        metavar="JSON",
        help='Extra fields for every request, such as {"top_k": 5}; null removes a field.',
    )


def _add_prompt_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--workload", choices=NAMES, help="Reference workload.")
    group.add_argument(
        "--dataset",
        choices=("random", "custom"),
        help="Random prompts, or those in --dataset-path (default: random)",
    )
    group.add_argument(
        "--dataset-path",
        type=Path,
        metavar="FILE",
        help="JSON Lines file with prompt and output_len.",
    )
    group.add_argument(
        "--num-prompts",
        type=positive_int,
        metavar="N",
        help=f"Number of requests (default: {DEFAULT_NUM_PROMPTS}, or all in the file)",
    )
    for flag, what in (("--input-len", "Prompt"), ("--output-len", "Output")):
        text = f"{what} tokens per request (default: {DEFAULT_LEN})"
        group.add_argument(flag, type=positive_int, metavar="N", help=text)
    group.add_argument(
        "--range-ratio",
        type=ratio,
        metavar="R",
        help="Draw lengths from (1 - R) to (1 + R) times these values (default: 0)",
    )
    group.add_argument(
        "--temperature",
        type=float,
        metavar="X",
        help="Sampling temperature (default: the workload's, or 0)",
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Always generate the full output length (default: on, off for --dataset custom)",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="Seed for prompts, arrival times and LoRA adapters (default: 0)",
    )


def _add_load_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--request-rate",
        type=positive_float,
        default=math.inf,
        metavar="R",
        help="Average requests per second (default: inf, all at once)",
    )
    group.add_argument(
        "--burstiness",
        type=positive_float,
        default=1.0,
        metavar="X",
        help="1: Poisson arrivals; lower: burstier; higher: more even (default: %(default)s)",
    )
    group.add_argument(
        "--max-concurrency",
        type=positive_int,
        metavar="N",
        help="Maximum requests in flight; further ones wait (default: no limit)",
    )
    group.add_argument(
        "--num-warmups",
        type=natural_int,
        default=0,
        metavar="N",
        help="Warm-up requests, not measured (default: %(default)s)",
    )


def positive_float(text: str) -> float:
    if not (number := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return number


def ratio(text: str) -> float:
    if not 0 <= (number := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to below 1, got {text}")
    return number


def goal(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in GOALS:
        raise argparse.ArgumentTypeError(f"must begin with {', '.join(GOALS)} and :, got {text}")
    return name, positive_float(limit)


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be JSON, got {text}: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return value


def refuse_generation_flags(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for flags that only apply to generation."""
    names = ("output_len", "temperature", "ignore_eos")
    extra = [name for name in names if getattr(args, name) is not None]
    extra += [f"goodput {name}" for name, _ in args.goodput if name != "e2el"]
    if extra:
        raise ConfigError(f"openai-embeddings generates nothing: drop {', '.join(extra)}")


def run(args: argparse.Namespace) -> int:
    from penstock.cli.bench.http import Address, HttpClient
    from penstock.cli.bench.load import Load
    from penstock.cli.bench.plot import require_matplotlib

    if args.backend == "openai-embeddings":
        refuse_generation_flags(args)
    prompts = prompts_from_args(args)
    address = Address.parse(args.base_url)
    load = Load(args.request_rate, args.burstiness, args.max_concurrency, args.timeout)
    if args.plot is not None:
        require_matplotlib()
    raise_open_files_limit()

    async def main() -> int:
        with contextlib.closing(HttpClient(address, args.api_key)) as client:
            dialect, result = await measure(client, args, prompts, load)
        return report(args, prompts, load, dialect, result)

    return run_in_event_loop(main())


async def measure(
    client: HttpClient, args: argparse.Namespace, prompts: PromptSet, load: Load
) -> tuple[Dialect, LoadResult]:
    """Find out what the server supports, warm it up, and run the load."""
    from tqdm import tqdm

    from penstock.cli.bench.load import agree, first_model, read_drafts, run_load, warm_up
    from penstock.cli.bench.streams import Dialect

    generates = args.backend != "openai-embeddings"
    fields: dict[str, Any] = {}
    if generates:
        temperature = prompts.temperature if args.temperature is None else args.temperature
        ignore_eos = prompts.ignore_eos if args.ignore_eos is None else args.ignore_eos
        fields = {"temperature": temperature, "ignore_eos": ignore_eos or None}
    dialect = Dialect(
        backend=args.backend,
        model=args.model or await first_model(client, load.timeout_s),
        fields=fields | args.extra_body,
        takes_token_ids=args.backend != "openai-chat",
        takes_usage=generates,
    )
    dialect = await agree(client, dialect, load.timeout_s)
    requests = prompts.requests
    if args.lora_modules:
        requests = pick_models(requests, [dialect.model, *args.lora_modules], args.seed)
    await warm_up(client, dialect, requests, args.num_warmups, load, args.seed)
    due_times = load.due_times(len(requests), args.seed)
    before = await read_drafts(client, load.timeout_s) if generates else None
    with tqdm(total=len(requests), unit="request", disable=None) as progress:
        result = await run_load(client, dialect, requests, due_times, load, progress.update)
    if before is not None:
        after = await read_drafts(client, load.timeout_s)
        result = replace(result, drafts=None if after is None else after - before)
    return dialect, result


def report(
    args: argparse.Namespace, prompts: PromptSet, load: Load, dialect: Dialect, result: LoadResult
) -> int:
    """Write the report. Returns the exit code: 1 if no request completed."""
    from penstock.cli.bench.plot import plot
    from penstock.cli.bench.serve_report import render, summarize, summarize_embeddings

    setting = {
        "base_url": args.base_url,
        "model": dialect.model,
        "lora_modules": args.lora_modules,
        "backend": dialect.backend,
        "workload": prompts.name,
        "prompts": f"{len(prompts.requests)} prompts of {dialect.prompt_kind(prompts.requests)}",
        "request_rate": None if math.isinf(load.request_rate) else load.request_rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
        "seed": args.seed,
        "num_warmups": args.num_warmups,
        "fields": dict(dialect.fields),
    }
    summarize_run = summarize_embeddings if args.backend == "openai-embeddings" else summarize
    summary = summarize_run(result, dict(args.goodput))
    document = {"benchmark": "serve", "penstock": penstock.__version__, **setting, **summary}
    write_report(render(setting, summary), document, args.json)
    if args.plot is not None:
        plot(document, args.plot)
    return 0 if summary["completed"] else 1


def raise_open_files_limit() -> None:
    """Raise the limit on open files: every stream is one, and the default limit is low."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # then the limit stays the same
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2**16)), hard))
