"""`penstock replicas`: shows and changes the replicas of a running server."""

from __future__ import annotations

import argparse
from typing import Any

from penstock.cli.remote import read_json
from penstock.protocol.errors import ConfigError

ACTIONS = {
    "list": "show the replicas",
    "add": "start one more",
    "drain": "give one no new requests, and wait until it has none",
    "restart": "drain one and give it another engine",
    "remove": "drain one and stop its engine",
    "rolling-restart": "restart all, one after the other",
}
ON_ONE = ("drain", "restart", "remove")  # these take the index of a replica


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = "; ".join(f"{name}: {what}" for name, what in ACTIONS.items())
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help=f"{actions}.")
    parser.add_argument("replica", nargs="?", type=int, metavar="N", help="Index of a replica.")
    parser.add_argument(
        "--base-url",
        metavar="URL",
        default="http://127.0.0.1:8000",
        help="URL of the server. (default: http://127.0.0.1:8000)",
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="One of the server's admin API keys (--admin-api-key)."
    )
    parser.add_argument(
        "--timeout-s",
        metavar="X",
        type=float,
        default=30.0,
        help="Seconds for a replica's requests to end, before they continue on the others. "
        "(default: 30)",
    )
    parser.add_argument(
        "--model", help="With rolling-restart: another version of the model, with its tokenizer."
    )


def run(args: argparse.Namespace) -> int:
    if (args.replica is not None) != (args.action in ON_ONE):
        takes = "takes the index of a replica" if args.action in ON_ONE else "takes no index"
        raise ConfigError(f"{args.action} {takes}")
    if args.model is not None and args.action != "rolling-restart":
        raise ConfigError(f"{args.action} takes no --model")
    body: dict[str, Any] = {"timeout_s": args.timeout_s}
    if args.action == "list":
        reply = ask(args, "/replicas", None)
    elif args.action == "add":
        reply = ask(args, "/replicas", {})
    elif args.action == "rolling-restart":
        model = {} if args.model is None else {"model": args.model}
        reply = ask(args, "/replicas/rolling_restart", body | model)
    else:
        reply = ask(args, f"/replicas/{args.replica}/{args.action}", body)
    for item in reply["replicas"]:
        print(
            f"{item['engine']}  {item['state']:<10}  {item['server_load']} requests, "
            f"KV cache {100 * item['kv_cache_usage']:.0f} %"
        )
    return 0


def ask(args: argparse.Namespace, path: str, body: dict[str, Any] | None) -> Any:
    """Send a request. There is no time limit: loading a model may take long."""
    return read_json(args.base_url.rstrip("/") + path, body, args.api_key)
