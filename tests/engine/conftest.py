"""Small models for whole-engine tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import make_checkpoint


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("tiny_llama"), "llama"))


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny_qwen3"), "qwen3")
