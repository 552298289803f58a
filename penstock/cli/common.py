"""Shared by the commands: their arguments and how they create an engine."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from penstock.config.cli import engine_options_from_args, sampling_options_from_args
from penstock.protocol.errors import InputError, RequestFault
from penstock.protocol.outputs import RequestOutput

if TYPE_CHECKING:
    from penstock.llm import LLM


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
