"""What several commands share: how they register themselves, and how they make an engine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from penstock.protocol.errors import RequestFault
from penstock.protocol.outputs import RequestOutput

if TYPE_CHECKING:
    from penstock.llm import LLM

Subparsers = argparse._SubParsersAction  # generic in the stubs alone


class Command(Protocol):
    """A module of this package. Its name is the command's, with ``-`` for ``_``.

    `ARGUMENTS`, if it has them, stand in the usage line for what follows the options.
    """

    __name__: str
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's flags."""

    def run(self, args: argparse.Namespace) -> int:
        """Carry the command out; its exit code."""


def add_commands(
    parser: argparse.ArgumentParser, dest: str, commands: Sequence[Command]
) -> Subparsers[Any]:
    """Let `parser` take one of these commands."""
    subparsers = parser.add_subparsers(dest=dest, metavar=dest.upper(), required=True)
    for command in commands:
        name, help = command.__name__.rpartition(".")[2].replace("_", "-"), command.HELP
        own = subparsers.add_parser(name, help=help, description=help, allow_abbrev=False)
        arguments = getattr(command, "ARGUMENTS", "")
        own.usage = f"{own.prog} [OPTIONS] {arguments}".rstrip()  # not every flag there is
        own.set_defaults(run=command.run, parser=own)
        command.add_arguments(own)
    return subparsers


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """``MODEL`` without a flag, for commands that take nothing else so."""
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="Same as --model.")


def take_model_argument(args: argparse.Namespace) -> None:
    """Make ``MODEL`` the ``--model`` that it stands for."""
    if args.positional_model is not None:
        if hasattr(args, "model"):
            args.parser.error("the model is given twice: as MODEL and as --model")
        args.model = args.positional_model
    elif args.flag_of_several and not hasattr(args, "model") and args.config is None:
        args.parser.error(
            f"the last value of {args.flag_of_several} may be one of several, or the model: give "
            "the model before it, or as --model"
        )


def open_llm(options: dict[str, Any]) -> LLM:
    """An engine, for a `with`. Torch is imported here and not before."""
    from penstock import LLM

    return LLM(**options)


def check(output: RequestOutput) -> RequestOutput:
    """`output`, unless its request failed: then `RequestFault`."""
    if output.error is not None:
        raise RequestFault(f"request {output.request_id} failed: {output.error}")
    return output
