"""The `penstock` command: selects the subcommand and turns errors into messages and exit codes.

Exit codes: 0 success, 1 failure, 2 invalid request or configuration, 130 interrupted.
"""

from __future__ import annotations

import argparse
import atexit
import errno
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import penstock
from penstock.cli.help import Help
from penstock.protocol.errors import ConfigError, InputError, PenstockError
from penstock.protocol.processes import collector_at_rest, exit_at_once


class Command(NamedTuple):
    """A module of this package that defines `add_arguments(parser)` and `run(args)`.

    The module has the command's name. It is imported when the command is chosen.
    """

    help: str
    arguments: str = ""  # shown in the usage line after the options


COMMANDS = {
    "serve": Command("Serve a model behind an OpenAI-compatible API.", "[MODEL]"),
    "generate": Command(
        "Complete prompts. The text goes to standard output, everything else to standard error.",
        "[PROMPT ...]",
    ),
    "chat": Command("Chat with a model in the terminal, here or on a running server (--url)."),
    "complete": Command(
        "Complete prompts with a running server. Only the text goes to standard output.",
        "[PROMPT ...]",
    ),
    "run-batch": Command(
        "Run the requests in an OpenAI batch file. Results are appended to the output file as they "
        "finish. A second run with the same output file resumes the first.",
        "-i FILE -o FILE [MODEL]",
    ),
    "quantize": Command(
        "Quantize a checkpoint to the compressed-tensors format and compare perplexity before and "
        "after.",
        "MODEL OUT",
    ),
    "merge": Command(
        "Merge a LoRA adapter into a checkpoint, which then needs no adapter.", "MODEL ADAPTER OUT"
    ),
    "plan": Command(
        "Say what fits on given GPUs, and how fast it will be. Needs no GPU and no weights.",
        "[MODEL]",
    ),
    "replicas": Command(
        "List, add, drain, restart and remove the replicas of a running server.", "ACTION [N]"
    ),
    "completion": Command("Print the completion of commands and flags for a shell.", "SHELL"),
    "collect-env": Command("Print versions and hardware, for bug reports."),
}
BENCH_HELP = "Measure throughput, latency, startup, a server or a kernel."
BENCHMARKS = {
    "throughput": Command(
        "Measure tokens per second, or with a pooling model texts per second, with all requests "
        "sent at once. Prefix caching is off by default."
    ),
    "latency": Command(
        "Measure the latency of one batch of requests: time to first token (in a separate run of "
        "one token), time per output token and end-to-end latency. Of a pooling model, the time "
        "for all vectors. Prefix caching is off by default."
    ),
    "startup": Command(
        "Measure the time from process start to the first token, in fresh processes. The warm-up "
        "run downloads the model if necessary."
    ),
    "serve": Command("Measure latency and throughput of any OpenAI-compatible server."),
    "sweep": Command(
        "Run bench serve over rates and options, plot latency against throughput, and mark the "
        "Pareto front. A second run into the same folder resumes the first.",
        "-o DIR --vary NAME=V1,V2 -- FLAGS",
    ),
    "attention": Command(
        "Measure the attention kernel of this device on batches such as 8q1s2k,q2k.",
        "BATCH [BATCH ...]",
    ),
    "compare": Command("Compare two reports that --json wrote.", "A.json B.json"),
}


# What to do about errors of the operating system, which no command expects.
ADVICE = {
    errno.ENOSPC: "free some space, or write elsewhere (models: --download-dir)",
    errno.EDQUOT: "free some space, or write elsewhere (models: --download-dir)",
    errno.EROFS: "write elsewhere (models: --download-dir)",
    errno.EACCES: "give this user access, or choose another place",
    errno.EADDRINUSE: "stop the other program, or choose another --port",
    errno.ECONNREFUSED: "is the server running, and is its address right?",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


class Parser(argparse.ArgumentParser):
    """Reports an error in one line. argparse would print all flags."""

    module: str | None = None  # of a command whose arguments are not added yet

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, add_help=False)
        self.add_argument("-h", "--help", action=Help)

    def load(self) -> None:
        """Import the command and add its arguments."""
        if self.module is not None:
            with collector_at_rest():
                command = importlib.import_module(self.module)
            self.module = None
            command.add_arguments(self)
            self.set_defaults(run=command.run, parser=self)

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        self.load()
        return super().parse_known_args(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"penstock: error: {message} (see {self.prog} --help)\n")


def build_parser() -> Parser:
    parser = Parser(
        prog="penstock",
        description="An inference engine for large language models.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"penstock {penstock.__version__}")
    commands = _add_commands(parser, "command", COMMANDS, "penstock.cli")
    benchmarks = commands.add_parser(
        "bench", help=BENCH_HELP, description=BENCH_HELP, allow_abbrev=False
    )
    _add_commands(benchmarks, "benchmark", BENCHMARKS, "penstock.cli.bench")
    return parser


def _add_commands(
    parser: Parser, dest: str, commands: Mapping[str, Command], package: str
) -> argparse._SubParsersAction[Parser]:
    subparsers = parser.add_subparsers(dest=dest, metavar=dest.upper(), required=True)
    for name, (help, arguments) in commands.items():
        own = subparsers.add_parser(name, help=help, description=help, allow_abbrev=False)
        own.usage = f"{own.prog} [OPTIONS] {arguments}".rstrip()  # without a list of all flags
        own.module = f"{package}.{name.replace('-', '_')}"
    return subparsers


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. `argv` defaults to the process's arguments."""
    exit_at_once()
    open_standard_streams()
    atexit.register(drop_unwritten_log)
    parser = build_parser()
    args, unknown = parser.parse_known_args(_expand(parser, argv))
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
    except BrokenPipeError:
        # The reader of our output is gone, such as `head`. Python would fail again when it flushes
        # standard output at exit, so that goes to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if getattr(args, "log_level", None) == "debug" or error.errno not in ADVICE:
            raise
        name = f"{error.filename}: " if error.filename is not None else ""
        advice = f"{name}{error.strerror}; {ADVICE[error.errno]}"
        print(f"penstock: error: {advice}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _expand(parser: Parser, argv: Sequence[str] | None) -> Sequence[str]:
    """The arguments, with `--option.key` as part of its option."""
    argv = sys.argv[1:] if argv is None else argv
    if not any(argument.startswith("--") and "." in argument for argument in argv):
        return argv
    from penstock.config.cli import expand_dotted_flags  # not for a plain --help

    try:
        return expand_dotted_flags(argv)
    except ConfigError as error:
        parser.error(str(error))


def open_standard_streams() -> None:
    """Open /dev/null for standard streams that the caller closed.

    Otherwise their descriptors would be reused for sockets, and printed text would go there.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115  # gets the lowest free descriptor: its own
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def drop_unwritten_log() -> None:
    """At exit: what a full disk did not take of the log does not change the exit code."""
    try:
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _unknown_arguments(parser: argparse.ArgumentParser, unknown: list[str]) -> str:
    from penstock.config.hints import hint_for  # not for a plain --help
    from penstock.config.vllm_names import BENCH_FLAGS, NOT_NEEDED, NOT_SUPPORTED, find_foreign

    flag = unknown[0].partition("=")[0]
    known = [
        option
        for option in parser._option_string_actions
        if option.startswith("--no-") == flag.startswith("--no-") and find_foreign(option) is None
    ]
    own = BENCH_FLAGS if parser.prog.startswith("penstock bench ") else {}
    table = NOT_NEEDED | NOT_SUPPORTED | own
    hint = hint_for(flag, known, table) if flag.startswith("-") else None
    return f"unrecognized arguments: {' '.join(unknown)}" + (f"; {hint}" if hint else "")
