"""Shared by the commands: how they are registered and how they create an engine."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from penstock.config.cli import engine_options_from_args, sampling_options_from_args
from penstock.protocol.errors import InputError, RequestFault
from penstock.protocol.outputs import RequestOutput

if TYPE_CHECKING:
    from penstock.llm import LLM

Subparsers = argparse._SubParsersAction  # generic only in the type stubs


class Command(Protocol):
    """A module of this package. The command has its name, with ``-`` for ``_``.

    `ARGUMENTS`, if defined, are shown in the usage line after the options.
    """

    __name__: str
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's flags."""

    def run(self, args: argparse.Namespace) -> int:
        """Run the command. Returns its exit code."""


def add_commands(
    parser: argparse.ArgumentParser, dest: str, commands: Sequence[Command]
) -> Subparsers[Any]:
    """Add these commands to `parser`."""
    subparsers = parser.add_subparsers(dest=dest, metavar=dest.upper(), required=True)
    for command in commands:
        name, help = command.__name__.rpartition(".")[2].replace("_", "-"), command.HELP
        own = subparsers.add_parser(name, help=help, description=help, allow_abbrev=False)
        arguments = getattr(command, "ARGUMENTS", "")
        own.usage = f"{own.prog} [OPTIONS] {arguments}".rstrip()  # without a list of all flags
        own.set_defaults(run=command.run, parser=own)
        command.add_arguments(own)
    return subparsers


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``MODEL`` as a positional argument, for commands that have no other one."""
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="Same as --model.")


def take_model_argument(args: argparse.Namespace) -> None:
    """Copy ``MODEL`` to ``--model``."""
    if args.positional_model is not None:
        if hasattr(args, "model"):
            args.parser.error("the model is given twice: as MODEL and as --model")
        args.model = args.positional_model
    elif args.flag_of_several and not hasattr(args, "model") and args.config is None:
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
