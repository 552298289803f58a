"""The flags of `penstock bench serve`: ours, and vLLM's names for them."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from penstock.cli.bench.common import DEFAULT_LEN, add_json_argument, natural_int, positive_int
from penstock.cli.bench.prompts import DATASETS, DEFAULT_NUM_PROMPTS
from penstock.cli.bench.random_media import bucket_config, media_limits
from penstock.cli.bench.workloads import NAMES
from penstock.config.vllm_names import BENCH_BACKENDS

BACKENDS = ("openai", "vllm", "openai-chat", "openai-embeddings")
GOALS = ("ttft", "tpot", "e2el")
LATENCY_NAMES = ("ttft", "tpot", "itl", "e2el")
OUTPUT_KINDS = ("", "random-", "sharegpt-", "custom-", "prefix-repetition-")  # before output-len
SAMPLING_FIELDS: dict[str, type] = {
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "repetition_penalty": float,
    "logprobs": int,
}


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
    group.add_argument(
        "--percentile-metrics",
        type=latency_names,
        metavar="NAMES",
        help="Latencies to show, such as ttft,tpot,itl,e2el (default: all)",
    )
    group.add_argument(
        "--metric-percentiles",
        type=percentiles,
        default=(90.0, 99.0),
        metavar="LIST",
        help="Percentiles to show (default: 90,99)",
    )
    group.add_argument(
        "--profile",
        action="store_true",
        help="Have the server profile the run: POST /start_profile and /stop_profile.",
    )
    group.add_argument("--plot", type=Path, metavar="FILE", help="Also plot the run as a PNG.")
    add_json_argument(group)
    group.add_argument(
        "--save-result",
        action="store_true",
        help="Write the report as JSON with the names that vLLM's reports have, too.",
    )
    group.add_argument(
        "--save-detailed",
        action="store_true",
        help="With --save-result: each request's times, too.",
    )
    group.add_argument(
        "--append-result",
        action="store_true",
        help="With --save-result: append the report to the file, as one line.",
    )
    group.add_argument("--result-dir", type=Path, metavar="DIR", help="Folder of --save-result.")
    group.add_argument("--result-filename", metavar="NAME", help="File name of --save-result.")
    group.add_argument(
        "--metadata",
        nargs="+",
        type=key_value,
        default=[],
        metavar="NAME=VALUE",
        help="Texts to keep in the report.",
    )
    group.add_argument("--disable-tqdm", action="store_true", help="Show no progress bar.")
    for flag in ("--tokenizer", "--tokenizer-mode", "--ready-check-timeout-sec", "--label"):
        parser.add_argument(flag, help=argparse.SUPPRESS)  # vLLM's; not needed here
    parser.add_argument("--trust-remote-code", action="store_true", help=argparse.SUPPRESS)


def _add_server_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--base-url",
        metavar="URL",
        help="Server to measure (default: http://127.0.0.1:8000, or --host and --port)",
    )
    group.add_argument("--host", metavar="NAME", help="Host, instead of --base-url.")
    group.add_argument("--port", type=positive_int, metavar="N", help="Port, with --host.")
    group.add_argument(
        "--endpoint", metavar="PATH", help="Path to post to (default: the backend's)"
    )
    group.add_argument(
        "--header",
        nargs="+",
        type=key_value,
        default=[],
        metavar="NAME=VALUE",
        help="HTTP headers for every request.",
    )
    group.add_argument(
        "--backend",
        "--endpoint-type",
        type=backend,
        metavar="NAME",
        default="openai",
        help="API to use: /v1/completions (openai or vllm), /v1/chat/completions "
        "(openai-chat) or /v1/embeddings (openai-embeddings) (default: %(default)s)",
    )
    group.add_argument(
        "--model",
        "--served-model-name",
        metavar="NAME",
        help="Model name (default: the first of /v1/models)",
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
        "--insecure", action="store_true", help="Do not verify the server's certificate."
    )
    group.add_argument(
        "--request-id-prefix",
        metavar="TEXT",
        help="Send X-Request-Id with this and the request's number.",
    )
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
        "--dataset-name",
        choices=DATASETS,
        help="random: random tokens. random-mm: random images and videos before random tokens, "
        "over openai-chat. prefix_repetition: random tokens after shared prefixes. "
        "conversations: several turns each, random or those of a ShareGPT file, over openai-chat. "
        "sharegpt: the first turns of a ShareGPT file. custom: a JSON Lines file (default: random)",
    )
    group.add_argument(
        "--dataset-path",
        type=Path,
        metavar="FILE",
        help="JSON Lines file with prompt and output_len, or a ShareGPT file (JSON).",
    )
    group.add_argument(
        "--num-prompts",
        type=positive_int,
        metavar="N",
        help=f"Number of requests (default: {DEFAULT_NUM_PROMPTS}, or all in the file)",
    )
    for names, what in (
        (["--input-len", "--random-input-len"], "Prompt"),
        ([f"--{kind}output-len" for kind in OUTPUT_KINDS], "Output"),
    ):
        text = f"{what} tokens per request or turn (default: {DEFAULT_LEN}, or the file's)"
        group.add_argument(*names, type=positive_int, metavar="N", help=text)
    for flag, text in (
        ("--random-prefix-len", "Tokens at the start that all random prompts share."),
        ("--prefix-repetition-prefix-len", "Tokens of a shared prefix (default: 256)"),
        ("--prefix-repetition-suffix-len", "Tokens after the shared prefix (default: 256)"),
        ("--prefix-repetition-num-prefixes", "Number of shared prefixes (default: 10)"),
        ("--num-turns", "Turns of a random conversation (default: 4)"),
    ):
        group.add_argument(flag, type=positive_int, metavar="N", help=text)
    group.add_argument(
        "--range-ratio",
        "--random-range-ratio",
        type=ratio,
        metavar="R",
        help="Draw lengths from (1 - R) to (1 + R) times these values (default: 0)",
    )
    _add_media_arguments(group)
    _add_order_arguments(group)
    group.add_argument(
        "--temperature",
        type=float,
        metavar="X",
        help="Sampling temperature (default: the workload's, or 0)",
    )
    for name, kind in SAMPLING_FIELDS.items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=kind, metavar="X", help=f"{name} of every request.")
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Always generate the full output length (default: on for random prompts)",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="Seed for prompts, arrival times and LoRA adapters (default: 0)",
    )


def _add_media_arguments(group: argparse._ArgumentGroup) -> None:
    """Of the dataset random-mm."""
    group.add_argument(
        "--random-mm-base-items-per-request",
        type=natural_int,
        metavar="N",
        help="Images and videos in a request (default: 1)",
    )
    group.add_argument(
        "--random-mm-num-mm-items-range-ratio",
        type=ratio,
        metavar="R",
        help="Draw the number of items from (1 - R) to (1 + R) times this (default: 0)",
    )
    group.add_argument(
        "--random-mm-limit-mm-per-prompt",
        type=media_limits,
        metavar="JSON",
        help='Maximum items per request, such as {"image": 3, "video": 1} (default: no limit)',
    )
    group.add_argument(
        "--random-mm-bucket-config",
        type=bucket_config,
        metavar="DICT",
        help="Share of each size, (height, width, frames); one frame is an image "
        "(default: {(256, 256, 1): 0.5, (720, 1280, 1): 0.5})",
    )


def _add_order_arguments(group: argparse._ArgumentGroup) -> None:
    """Of the prompts of a file."""
    group.add_argument(
        "--disable-shuffle", action="store_true", help="Keep the order of a ShareGPT file."
    )
    group.add_argument(
        "--no-oversample",
        action="store_true",
        help="Send the requests of a file once, if it has fewer than --num-prompts.",
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
        "--ramp-up-strategy",
        choices=("linear", "exponential"),
        help="Raise the rate over the run, from --ramp-up-start-rps to --ramp-up-end-rps.",
    )
    for end in ("start", "end"):
        flag = f"--ramp-up-{end}-rps"
        text = f"Requests per second at the {end}."
        group.add_argument(flag, type=positive_float, metavar="R", help=text)
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


def backend(text: str) -> str:
    if text in BENCH_BACKENDS:
        raise argparse.ArgumentTypeError(f"{text} is not supported: {BENCH_BACKENDS[text]}")
    if text not in BACKENDS:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(BACKENDS)}, got {text!r}")
    return text


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


def key_value(text: str) -> tuple[str, str]:
    name, is_pair, value = text.partition("=")
    if not is_pair or not name:
        raise argparse.ArgumentTypeError(f"must look like NAME=VALUE, got {text}")
    return name, value


def latency_names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in LATENCY_NAMES]:
        known = ", ".join(LATENCY_NAMES)
        raise argparse.ArgumentTypeError(f"must be some of {known}, got {unknown[0]}")
    return names


def percentiles(text: str) -> tuple[float, ...]:
    numbers = tuple(float(part) for part in text.split(","))
    if not all(0 <= number <= 100 for number in numbers):
        raise argparse.ArgumentTypeError(f"must be numbers from 0 to 100, got {text}")
    return numbers


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be JSON, got {text}: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return value
