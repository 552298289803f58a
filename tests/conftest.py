"""Fixtures that every test may use."""

from __future__ import annotations

import sys

import pytest

from penstock.config.model import DEFAULT_MODEL


@pytest.fixture(scope="session")
def default_model() -> str:
    """The real default model; fetched once and kept in the user's cache."""
    return DEFAULT_MODEL


@pytest.fixture(scope="session", autouse=True)
def _few_torch_threads() -> None:
    """The models of most tests are tiny: on a large machine, many threads only get in the way.

    Sessions whose tests never imported torch are spared its import.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(min(torch.get_num_threads(), 4))
