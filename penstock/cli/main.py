"""The `penstock` command: selects the subcommand and turns errors into messages and exit codes.

Exit codes: 0 success, 1 failure, 2 invalid request or configuration, 130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import penstock
from penstock.cli import bench, chat, collect_env, generate, merge, quantize, run_batch, serve
from penstock.cli.common import Command, add_commands
from penstock.protocol.errors import ConfigError, InputError, PenstockError

COMMANDS: Sequence[Command] = (serve, generate, chat, run_batch, quantize, merge, collect_env)


class Parser(argparse.ArgumentParser):
    """Reports an error in one line. argparse would print all flags."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"penstock: error: {message} (see {self.prog} --help)\n")


def build_parser() -> Parser:
    parser = Parser(
        prog="penstock",
        description="An inference engine for large language models.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"penstock {penstock.__version__}")
    commands = add_commands(parser, "command", COMMANDS)
    benchmarks = commands.add_parser(
        "bench", help=bench.HELP, description=bench.HELP, allow_abbrev=False
    )
    add_commands(benchmarks, "benchmark", bench.BENCHMARKS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. `argv` defaults to the process's arguments."""
    open_standard_streams()
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        args.parser.error(_unknown_arguments(args.parser, unknown))
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except PenstockError as error:
        if getattr(args, "log_level", None) == "debug":
            raise
        print(f"penstock: error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, InputError)) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output is gone, such as `head`. Python would fail again when it flushes
        # standard output at exit, so that goes to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def open_standard_streams() -> None:
    """Open /dev/null for standard streams that the caller closed.

    Otherwise their descriptors would be reused for sockets, and printed text would go there.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115  # gets the lowest free descriptor: its own
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _unknown_arguments(parser: argparse.ArgumentParser, unknown: list[str]) -> str:
    message = f"unrecognized arguments: {' '.join(unknown)}"
    flag = unknown[0].partition("=")[0]
    close = difflib.get_close_matches(flag, parser._option_string_actions, n=1)
    return f"{message}; did you mean {close[0]}?" if close else message
