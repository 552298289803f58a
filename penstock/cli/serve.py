"""`penstock serve`: a model behind an OpenAI-compatible API."""

from __future__ import annotations

import argparse
from collections.abc import Coroutine
from typing import Any

from penstock.cli.common import Subparsers, add_command
from penstock.config.cli import (
    add_engine_arguments,
    add_server_arguments,
    serve_options_from_args,
)


def add_parser(subparsers: Subparsers[Any]) -> None:
    parser = add_command(
        subparsers, "serve", run, "Serve a model behind an OpenAI-compatible API.", "[MODEL]"
    )
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="The same as --model.")
    add_engine_arguments(parser)
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.positional_model is not None:
        if hasattr(args, "model"):
            args.parser.error("the model is given twice: as MODEL and as --model")
        args.model = args.positional_model
    config, server_config = serve_options_from_args(args)

    from penstock.observability.logs import setup_logging

    setup_logging(config.observability.log_level)
    from penstock.server.run import serve

    return run_in_event_loop(serve(config, server_config))


def run_in_event_loop(main: Coroutine[Any, Any, int]) -> int:
    """On uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        import asyncio

        return asyncio.run(main)
    return uvloop.run(main)
