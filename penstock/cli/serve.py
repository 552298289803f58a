"""`penstock serve`: serves a model behind an OpenAI-compatible API."""

from __future__ import annotations

import argparse

from penstock.cli.common import add_model_argument, take_model_argument
from penstock.config.cli import (
    add_engine_arguments,
    add_server_arguments,
    serve_options_from_args,
)
from penstock.server.serving import run_in_event_loop


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_engine_arguments(parser, several=["served_model_name"])
    add_server_arguments(parser, several=["lora_modules", "lora_resolver", "allowed_lora_paths"])


def run(args: argparse.Namespace) -> int:
    take_model_argument(args)
    config, server_config = serve_options_from_args(args)

    from penstock.observability.logs import setup_logging

    setup_logging(config.observability.log_level, config.observability.log_format)
    if config.parallel.node_rank > 0:
        from penstock.executor.nodes import run_node

        return run_node(config)
    from penstock.server.run import serve

    return run_in_event_loop(serve(config, server_config))
