"""Tiny checkpoints and adapters, made once for all tests of adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapters import (
    FLAVOURS,
    SINGLE_EXPERTS,
    MakeAdapter,
    MakeCheckpoint,
    make_flavour,
    make_single_experts,
)
from tiny_models import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """The checkpoint of a variant."""
    made: dict[str, Path] = {}

    def make(variant: str) -> Path:
        if variant not in made:
            made[variant] = make_checkpoint(tmp_path_factory.mktemp(variant), variant)
        return made[variant]

    return make


@pytest.fixture(scope="session")
def checkpoint(checkpoint_of: MakeCheckpoint) -> Path:
    """The checkpoint of most tests."""
    return checkpoint_of("llama")


@pytest.fixture(scope="session")
def adapter_of(
    checkpoint_of: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> MakeAdapter:
    """The adapter of a flavour, or of a variant with single experts. Do not change its files."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(f"adapter_{name}")
            if name in SINGLE_EXPERTS:
                made[name] = make_single_experts(folder, checkpoint_of(name), name)
            else:
                made[name] = make_flavour(folder, checkpoint_of(FLAVOURS[name].variant), name)
        return made[name]

    return make
