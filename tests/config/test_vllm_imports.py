"""Imports of vLLM's scripts: each works here too, or the error says what to do about it."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest

from penstock.config.docs import render_vllm_modules
from penstock.protocol.vllm_modules import MODULES

LISTED = (Path(__file__).parent / "vllm_imports.txt").read_text()
THEIRS = [
    (line.split()[0].replace("vllm", "penstock", 1), name)
    for line in LISTED.splitlines()
    if not line.startswith("#")
    for name in line.split()[1:]
]


@pytest.mark.parametrize(("module", "name"), THEIRS)
def test_every_import_works_or_says_what_to_do(module: str, name: str) -> None:
    try:
        exec(f"from {module} import {name}", {})
        said = " is not in Penstock: "
    except ImportError as error:
        said = str(error)
    assert " is not in Penstock: " in said


@pytest.mark.parametrize("name", MODULES)
def test_no_module_of_ours_is_in_the_table(name: str) -> None:
    with pytest.raises(ImportError, match=f"penstock.{name} is not in Penstock: "):
        importlib.util.find_spec(f"penstock.{name}")


def test_a_module_that_nobody_knows_is_answered_as_ever() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'penstock\.unheard_of'$"):
        importlib.import_module("penstock.unheard_of")


def test_the_migration_page_shows_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "moving-from-vllm.md"
    assert render_vllm_modules() in page.read_text(), (
        "run: python -m penstock.config.docs vllm-modules"
    )
