"""`penstock run-batch`: runs a file of requests in OpenAI's batch format, without a server."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.bench.common import positive_int
from penstock.cli.common import add_model_argument, take_model_argument
from penstock.config import EngineConfig, ServerConfig
from penstock.config.cli import (
    add_engine_arguments,
    add_server_arguments,
    serve_options_from_args,
)
from penstock.protocol.errors import ConfigError
from penstock.server.serving import run_in_event_loop

if TYPE_CHECKING:
    from penstock.engine.async_client import AsyncEngineClient
    from penstock.server.batch.files import BatchOutput
    from penstock.server.batch.run import BatchSummary

ALL_FAILED_EXIT_CODE = 4  # every line failed
ADAPTER_OPTIONS = ("lora_modules", "lora_resolver")
NO_LIMIT = 2**31  # of the queue: the batch itself limits concurrency


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        "-i",
        "--input-file",
        type=Path,
        required=True,
        metavar="FILE",
        help="Requests, one per line.",
    )
    parser.add_argument(
        "-o",
        "--output-file",
        type=Path,
        required=True,
        metavar="FILE",
        help="Results, one per line.",
    )
    parser.add_argument(
        "--max-concurrency",
        type=positive_int,
        metavar="N",
        help="Maximum concurrent requests (default: twice max_num_seqs)",
    )
    add_engine_arguments(parser)
    add_server_arguments(parser, several=ADAPTER_OPTIONS, only=ADAPTER_OPTIONS)


def run(args: argparse.Namespace) -> int:
    take_model_argument(args)
    config, server_config = serve_options_from_args(args, only=ADAPTER_OPTIONS)
    server_config = replace(server_config, max_queued_requests=NO_LIMIT)
    check_files(args.input_file, args.output_file)

    from penstock.observability.logs import setup_logging
    from penstock.server.batch.files import BatchOutput

    setup_logging(config.observability.log_level, config.observability.log_format)
    with closing(BatchOutput(args.output_file)) as output:
        batch = BatchRun(config, server_config, args.input_file, output, args.max_concurrency)
        return run_in_event_loop(batch.run())


@dataclass(frozen=True)
class BatchRun:
    config: EngineConfig
    server_config: ServerConfig
    input_path: Path
    output: BatchOutput
    max_concurrency: int | None

    async def run(self) -> int:
        """Run the batch on its own engine. Returns the exit code.

        The first SIGINT, SIGTERM or SIGHUP ends it. Another run continues with the remaining lines.
        """
        from penstock.engine.async_client import AsyncEngineClient
        from penstock.server.run import StopSignals

        stop = StopSignals()
        client = AsyncEngineClient()
        client.spawn(self.config)
        try:
            exit_code = await stop.unless_stopped(self._run_on(client))
            return stop.exit_code if exit_code is None else exit_code
        finally:
            await client.close()

    async def _run_on(self, client: AsyncEngineClient) -> int:
        """Run the batch and return the exit code."""
        from tqdm import tqdm

        from penstock.server.batch.files import read_lines
        from penstock.server.run import start

        service = await start(self.config, self.server_config, client)
        from penstock.server.app import build_app
        from penstock.server.batch.run import Batch
        from penstock.server.shared import shared_here

        assert client.info is not None
        num_lines = sum(1 for _ in read_lines(self.input_path))
        progress = tqdm(total=num_lines, unit="line", disable=None)  # only in a terminal
        batch = Batch(
            build_app(service, shared_here(service, client)),
            self.output,
            self.max_concurrency or 2 * client.max_num_seqs,
            on_line=progress.update,
        )
        started, is_done = time.perf_counter(), False
        try:
            await batch.run(read_lines(self.input_path))
            is_done = True
        finally:
            progress.close()
            service.close()
            elapsed_s = time.perf_counter() - started
            print(
                describe(batch.summary, elapsed_s, self.output.path, is_done),
                file=sys.stderr,
                flush=True,
            )
        if num_lines == 0 or batch.summary.num_completed + self.output.num_completed > 0:
            return 0
        print(f"All {num_lines} lines failed.", file=sys.stderr, flush=True)
        return ALL_FAILED_EXIT_CODE


def check_files(input_path: Path, output_path: Path) -> None:
    """Check the files before a model is loaded. Raises `ConfigError`."""
    try:
        input_path.open("rb").close()
    except OSError as error:
        raise ConfigError(f"cannot read {input_path}: {error.strerror}") from error
    if output_path.exists() and output_path.samefile(input_path):
        raise ConfigError(f"results would be added to the input, {input_path}: name another file")


def describe(summary: BatchSummary, elapsed_s: float, output_path: Path, is_done: bool) -> str:
    """Summarize the run in a few lines."""
    lines = [
        f"{summary.num_completed} completed, {summary.num_failed} failed, {summary.num_skipped} "
        f"skipped (done before) in {elapsed_s:.1f} s; results in {output_path}",
        f"{summary.num_input_tokens} input tokens, {summary.num_output_tokens} output tokens, "
        f"{summary.num_output_tokens / elapsed_s:.1f} output tokens/s",
    ]
    lines += [f"  failed: {error}" for error in summary.first_errors]
    if (num_more := summary.num_failed - len(summary.first_errors)) > 0:
        lines.append(f"  and {num_more} more")
    if not is_done:
        lines.append("Not finished: run the same command again to continue.")
    return "\n".join(lines)
