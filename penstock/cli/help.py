"""Help: `--help` for everything, `--help=NAME` for the flags and sections of that name."""

from __future__ import annotations

import argparse
from typing import Any


class Help(argparse.Action):
    def __init__(self, option_strings: list[str], dest: str, **settings: Any) -> None:
        settings |= {"nargs": "?", "default": argparse.SUPPRESS, "metavar": "NAME"}
        text = "Show this help, or the flags and sections whose name contains NAME, and exit."
        super().__init__(option_strings, argparse.SUPPRESS, help=text, **settings)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        found = None if values is None else help_on(parser, values)
        print(parser.format_help() if found is None else found, end="")
        parser.exit()


def help_on(parser: argparse.ArgumentParser, name: str) -> str | None:
    """The sections and flags whose name contains `name`, or None if there are none.

    vLLM's names of sections are known, too: those of its classes, such as ModelConfig.
    """
    wanted = name.lower().strip("-").replace("_", "-").removesuffix("config")
    formatter = parser._get_formatter()
    num_found = 0
    for group in parser._action_groups:
        shown = [item for item in group._group_actions if item.help != argparse.SUPPRESS]
        if wanted not in (group.title or "").lower().split():
            shown = [item for item in shown if any(wanted in flag for flag in item.option_strings)]
        num_found += len(shown)
        formatter.start_section(group.title)
        formatter.add_arguments(shown)
        formatter.end_section()
    return formatter.format_help() if wanted and num_found else None
