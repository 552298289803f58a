"""`penstock complete`: completes prompts with a running server. Only the text goes to stdout."""

from __future__ import annotations

import argparse

from penstock.cli.common import (
    DEFAULT_MAX_TOKENS,
    add_prompts_argument,
    add_remote_arguments,
    open_remote,
    read_prompts,
)
from penstock.config.cli import add_sampling_arguments, sampling_options_from_args
from penstock.protocol.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompts_argument(parser)
    parser.add_argument(
        "-q", "--quick", metavar="PROMPT", help="The same as PROMPT, as in vLLM's command."
    )
    add_remote_arguments(parser, "http://localhost:8000/v1")
    add_sampling_arguments(parser, max_tokens=DEFAULT_MAX_TOKENS)


def run(args: argparse.Namespace) -> int:
    sampling = sampling_options_from_args(args)
    if sampling.get("n", 1) != 1:
        raise InputError(f"complete gives one completion per prompt, got n={sampling['n']}", "n")
    prompts = read_prompts(args.prompts if args.quick is None else [args.quick, *args.prompts])
    model = open_remote(args, sampling)
    for prompt in prompts:
        for piece in model.complete(prompt):
            print(piece.text, end="", flush=True)
        print(flush=True)
    return 0
