"""The reference page is what the dataclasses say."""

from __future__ import annotations

from pathlib import Path

from penstock.config.docs import render
from penstock.config.engine import all_options
from penstock.config.sampling import sampling_options

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_reference_page_is_up_to_date() -> None:
    assert PAGE.read_text() == render(), (
        "run: python -m penstock.config.docs > docs/configuration.md"
    )


def test_the_reference_page_names_every_option_once() -> None:
    lines = render().splitlines()
    options = [*sampling_options(), *(o for section in all_options().values() for o in section)]
    for option in options:
        if option.name != "seed":  # of the engine, and of a request
            assert sum(line.startswith(f"| `{option.name}` |") for line in lines) == 1
