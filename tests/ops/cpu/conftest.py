"""Fixtures for the C++ library: every test runs once with each instruction set that is here."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from penstock.ops.cpu.library import load


def _library() -> ctypes.CDLL:
    library = load()
    assert library is not None, "build the C++ library first: pip install -e ."
    return library


def _instruction_sets() -> list[str]:
    library = load()
    if library is None:
        return ["none"]
    default = library.penstock_isa()
    names = ("portable", "neon", "avx2", "avxvnni", "avx512vnni")
    found = [name for name in names if library.penstock_select_isa(name.encode())]
    library.penstock_select_isa(default)
    return found


@pytest.fixture(params=_instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The instruction set in use, one after the other."""
    library = _library()
    default, threads = library.penstock_isa(), library.penstock_threads()
    assert library.penstock_select_isa(request.param.encode())
    library.penstock_set_threads(3)
    yield request.param
    library.penstock_set_threads(threads)
    library.penstock_select_isa(default)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
