"""Shared by the commands: their arguments and how they create an engine."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from penstock.config.cli import engine_options_from_args, sampling_options_from_args
from penstock.protocol.errors import InputError, RequestFault
from penstock.protocol.outputs import RequestOutput

if TYPE_CHECKING:
    from penstock.cli.remote import RemoteModel
    from penstock.llm import LLM

DEFAULT_MAX_TOKENS = 128  # of the completion of a prompt


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``MODEL`` as a positional argument, for commands that have no other one."""
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="Same as --model.")


def take_model_argument(args: argparse.Namespace) -> None:
    """Copy ``MODEL`` to ``--model``."""
    if args.positional_model is not None:
        if hasattr(args, "model"):
            args.parser.error("the model is given twice: as MODEL and as --model")
        args.model = args.positional_model
    elif hasattr(args, "flag_of_several") and not (
        hasattr(args, "model") or hasattr(args, "config")
    ):
        args.parser.error(
            f"the last value of {args.flag_of_several} may be one of several, or the model: give "
            "the model before it, or as --model"
        )


def add_prompts_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``PROMPT...``, which `read_prompts` reads."""
    parser.add_argument(
        "prompts",
        nargs="*",
        metavar="PROMPT",
        help="Text to complete. With - or without PROMPT, it is read from standard input.",
    )


def read_prompts(arguments: list[str]) -> list[str]:
    """Replace ``-`` by standard input, which is also read if there are no arguments.

    Raises `InputError` if ``-`` is given twice, or if there is nothing to read.
    """
    if arguments.count("-") > 1:
        raise InputError("- reads all of standard input and can be given once", "prompt")
    if not arguments:
        if sys.stdin.isatty():
            raise InputError("give a PROMPT, or send one to standard input", "prompt")
        arguments = ["-"]
    # The final newline comes from the shell and is not part of the prompt.
    return [sys.stdin.read().removesuffix("\n") if text == "-" else text for text in arguments]


def add_remote_arguments(parser: argparse.ArgumentParser, default_url: str | None) -> None:
    """Flags that name a running server."""
    default = f" (default: {default_url})" if default_url else ""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--url",
        default=default_url,
        help=f"URL of a running server, with any OpenAI-compatible API{default}.",
    )
    group.add_argument(
        "--model-name", metavar="NAME", help="Model of the server; default: its first one."
    )
    group.add_argument("--api-key", metavar="KEY", help="API key of the server.")


def open_remote(args: argparse.Namespace, sampling: dict[str, Any]) -> RemoteModel:
    """The model of a running server. Only sampling parameters that were given are sent."""
    from penstock.cli.remote import RemoteModel

    if "logit_bias" in sampling:
        sampling["logit_bias"] = {str(key): bias for key, bias in sampling["logit_bias"].items()}
    return RemoteModel(args.url, args.model_name, args.api_key, sampling)


def text_options(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """The engine and sampling options of a command that reads and writes text."""
    options = engine_options_from_args(args)
    if options.get("skip_tokenizer_init"):
        raise InputError("this command needs text: drop --skip-tokenizer-init")
    return options, sampling_options_from_args(args)


def open_llm(options: dict[str, Any]) -> LLM:
    """Open an LLM for a `with` statement. torch is imported only here."""
    from penstock import LLM

    return LLM(**options)


def check(output: RequestOutput) -> RequestOutput:
    """Return `output`. Raises `RequestFault` if its request failed."""
    if output.error is not None:
        raise RequestFault(f"request {output.request_id} failed: {output.error}")
    return output


@contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """Make SIGTERM raise, as Ctrl-C does, so that partial output is removed."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
