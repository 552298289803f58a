"""EngineArgs: the engine options as one object, as vLLM's scripts use them."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from penstock.config import EngineConfig
from penstock.config.cli import add_engine_arguments
from penstock.config.engine import all_options
from penstock.config.vllm_names import NOT_NEEDED, NOT_SUPPORTED

_Options: Any = dataclasses.make_dataclass(
    "_Options",
    [
        (declared.name, Any, dataclasses.field(default=None))
        for options in all_options().values()
        for declared in options
    ],
)


class EngineArgs(_Options):  # type: ignore[misc]
    """A dataclass of all engine options, for `from_engine_args` of `LLM` and `AsyncLLM`."""

    def __init__(self, model: str | None = None, **options: Any) -> None:
        if model is not None:
            options["model"] = model
        super().__init__(**EngineConfig.from_options(options).options())

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for every engine option, and for those that only vLLM has.

        The namespace has all of them, whether given or not, so that it can be changed and passed
        on: `LLM(**vars(args))`.
        """
        add_engine_arguments(parser, complete=True)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """The options in a namespace of `add_cli_args`. Others are left alone."""
        ours = {field.name for field in dataclasses.fields(cls)}
        names = ours | NOT_NEEDED.keys() | NOT_SUPPORTED.keys()
        return cls(**{name: value for name, value in vars(args).items() if name in names})


AsyncEngineArgs = EngineArgs
