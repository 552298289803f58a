"""The reference page is what the dataclasses say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.config.docs import render
from penstock.config.engine import all_options
from penstock.config.sampling import sampling_options
from penstock.protocol.errors import InputError
from penstock.protocol.sampling import SamplingParams

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


def test_the_bounds_of_logit_bias_that_the_page_gives_are_those_that_hold() -> None:
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith("| `logit_bias` |")]
    found = re.search(r"-(\d+) to (\d+); at most (\d+)", row)
    assert found
    lowest, highest, most = map(int, found.groups())
    biases = {token_id: float(highest) for token_id in range(most)}
    assert SamplingParams(logit_bias={**biases, 0: float(-lowest)}).logit_bias
    for wrong in ({**biases, most: 0.0}, {0: highest + 1.0}, {0: -lowest - 1.0}):
        with pytest.raises(InputError, match="logit_bias"):
            SamplingParams(logit_bias=wrong)
