"""`penstock bench serve`: measures any OpenAI-compatible server from the client's side."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import penstock
from penstock.cli.bench.common import write_report
from penstock.cli.bench.prompts import PromptSet, pick_models, prompts_from_args
from penstock.cli.bench.serve_flags import SAMPLING_FIELDS, add_arguments
from penstock.protocol.errors import ConfigError
from penstock.server.serving import run_in_event_loop

if TYPE_CHECKING:
    from penstock.cli.bench.http import HttpClient
    from penstock.cli.bench.load import Load, LoadResult, Ramp
    from penstock.cli.bench.streams import Dialect

DEFAULT_URL = "http://127.0.0.1:8000"
__all__ = ["add_arguments", "run"]


def refuse_generation_flags(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for flags that only apply to generation."""
    names = ("output_len", "temperature", "ignore_eos", *SAMPLING_FIELDS)
    extra = [name for name in names if getattr(args, name) is not None]
    extra += [f"goodput {name}" for name, _ in args.goodput if name != "e2el"]
    if extra:
        raise ConfigError(f"openai-embeddings generates nothing: drop {', '.join(extra)}")


def complete_args(args: argparse.Namespace) -> None:
    """Resolve the flags that stand for others. Raises `ConfigError`."""
    if args.backend == "vllm":
        args.backend = "openai"
    if args.base_url is not None and (args.host or args.port):
        raise ConfigError("base_url says host and port already: drop --host and --port")
    if args.host or args.port:
        args.base_url = f"http://{args.host or '127.0.0.1'}:{args.port or 8000}"
    args.base_url = args.base_url or DEFAULT_URL
    if args.endpoint is not None and not args.endpoint.startswith("/"):
        raise ConfigError(f"endpoint must begin with /, got {args.endpoint!r}")


def ramp_from_args(args: argparse.Namespace) -> Ramp | None:
    from penstock.cli.bench.load import Ramp

    ends = args.ramp_up_start_rps, args.ramp_up_end_rps
    if args.ramp_up_strategy is None:
        if any(ends):
            raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
        return None
    if not all(ends):
        raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    if not math.isinf(args.request_rate):
        raise ConfigError("--ramp-up-strategy sets the rate already: drop --request-rate")
    return Ramp(args.ramp_up_strategy, *ends)


def run(args: argparse.Namespace) -> int:
    from penstock.cli.bench.http import Address, HttpClient
    from penstock.cli.bench.load import Load
    from penstock.cli.bench.plot import require_matplotlib

    complete_args(args)
    if args.backend == "openai-embeddings":
        refuse_generation_flags(args)
    prompts = prompts_from_args(args)
    if prompts.needs_chat and args.backend != "openai-chat":
        raise ConfigError(
            "conversations, images and videos need a chat API: give --backend openai-chat"
        )
    address = Address.parse(args.base_url)
    load = Load(
        args.request_rate,
        args.burstiness,
        args.max_concurrency,
        args.timeout,
        ramp=ramp_from_args(args),
    )
    if args.plot is not None:
        require_matplotlib()
    raise_open_files_limit()

    async def main() -> int:
        client = HttpClient(
            address,
            args.api_key,
            args.header,
            is_verified=not args.insecure,
            request_id_prefix=args.request_id_prefix,
        )
        with contextlib.closing(client):
            dialect, result = await measure(client, args, prompts, load)
        return report(args, prompts, load, dialect, result)

    return run_in_event_loop(main())


async def measure(
    client: HttpClient, args: argparse.Namespace, prompts: PromptSet, load: Load
) -> tuple[Dialect, LoadResult]:
    """Find out what the server supports, warm it up, and run the load."""
    from tqdm import tqdm

    from penstock.cli.bench.load import (
        agree,
        control_profiler,
        first_model,
        read_drafts,
        run_load,
        warm_up,
    )
    from penstock.cli.bench.streams import Dialect

    generates = args.backend != "openai-embeddings"
    fields: dict[str, Any] = {}
    if generates:
        temperature = prompts.temperature if args.temperature is None else args.temperature
        ignore_eos = prompts.ignore_eos if args.ignore_eos is None else args.ignore_eos
        fields = {name: getattr(args, name) for name in SAMPLING_FIELDS}
        fields |= {"temperature": temperature, "ignore_eos": ignore_eos or None}
    dialect = Dialect(
        backend=args.backend,
        model=args.model or await first_model(client, load.timeout_s),
        fields=fields | args.extra_body,
        takes_token_ids=args.backend != "openai-chat",
        takes_usage=generates,
        endpoint=args.endpoint,
    )
    dialect = await agree(client, dialect, load.timeout_s)
    requests = prompts.requests
    if args.lora_modules:
        requests = pick_models(requests, [dialect.model, *args.lora_modules], args.seed)
    await warm_up(client, dialect, requests, args.num_warmups, load, args.seed)
    due_times = load.due_times(len(requests), args.seed)
    before = await read_drafts(client, load.timeout_s) if generates else None
    num_turns = sum(1 + len(request.followups) for request in requests)
    if args.profile:
        await control_profiler(client, "start", load.timeout_s)
    with tqdm(total=num_turns, unit="request", disable=args.disable_tqdm or None) as progress:
        result = await run_load(client, dialect, requests, due_times, load, progress.update)
    if args.profile:
        await control_profiler(client, "stop", load.timeout_s)
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

    setting: dict[str, Any] = {
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
        "fields": {name: value for name, value in dialect.fields.items() if value is not None},
        "metadata": dict(args.metadata),
    }
    if load.ramp is not None:
        setting["ramp_up"] = asdict(load.ramp)
    summarize_run = summarize_embeddings if args.backend == "openai-embeddings" else summarize
    summary = summarize_run(result, dict(args.goodput), args.metric_percentiles)
    document = {"benchmark": "serve", "penstock": penstock.__version__, **setting, **summary}
    write_report(render(setting, summary, args.percentile_metrics), document, args.json)
    if args.save_result:
        save_result(args, document)
    if args.plot is not None:
        plot(document, args.plot)
    return 0 if summary["completed"] else 1


def save_result(args: argparse.Namespace, document: dict[str, Any]) -> None:
    """Write the report to a file with vLLM's name and vLLM's keys beside ours."""
    from penstock.cli.bench.serve_report import with_vllm_keys

    when = time.strftime("%Y%m%d-%H%M%S")
    rate = "inf" if document["request_rate"] is None else f"{document['request_rate']:g}"
    model = document["model"].rpartition("/")[2]
    name = args.result_filename or f"{document['backend']}-{rate}qps-{model}-{when}.json"
    path = (args.result_dir or Path()) / name
    kept = {key: value for key, value in document.items() if key != "requests"}
    if args.save_detailed:
        kept["requests"] = document["requests"]
    kept |= with_vllm_keys(document) | {"date": when}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if args.append_result else "w") as file:
            file.write(json.dumps(kept, indent=None if args.append_result else 2) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def raise_open_files_limit() -> None:
    """Raise the limit on open files: every stream is one, and the default limit is low."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # then the limit stays the same
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2**16)), hard))
