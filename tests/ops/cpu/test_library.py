"""A library that does not fit the code beside it is not called: that would end the process."""

from __future__ import annotations

import _ctypes
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_engine import open_llm
from tiny_models import make_checkpoint

from penstock import SamplingParams
from penstock.cli.main import main
from penstock.ops.cpu import library
from penstock.ops.cpu.library import FILE_NAME, STALE, open_library, sources_hash

FOLDER = Path(library.__file__).parent


@pytest.fixture
def newer_sources(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the sources had been changed since the library was built."""
    library._find.cache_clear()
    monkeypatch.setattr(library, "sources_hash", lambda folder: "0" * 64)
    yield
    library._find.cache_clear()


def test_the_library_in_use_is_built_from_the_sources_beside_it() -> None:
    found = open_library(FOLDER / FILE_NAME, sources_hash(FOLDER / "csrc"))
    assert found.library is not None, found.problem
    assert library.load() is not None


def test_a_library_of_other_sources_is_stale(tmp_path: Path) -> None:
    expected = sources_hash(FOLDER / "csrc")
    assert expected is not None
    built = (FOLDER / FILE_NAME).read_bytes()
    assert built.count(expected.encode()) == 1
    older = tmp_path / FILE_NAME
    older.write_bytes(built.replace(expected.encode(), b"0" * 64))
    assert open_library(older, expected) == library.Found(None, STALE)
    assert open_library(older, "0" * 64).library is not None
    assert open_library(older, None).library is not None  # a wheel keeps no sources


def test_a_library_that_lacks_functions_is_stale() -> None:
    assert open_library(Path(_ctypes.__file__), "any") == library.Found(None, STALE)


def test_a_file_that_is_no_library_is_reported(tmp_path: Path) -> None:
    broken = tmp_path / FILE_NAME
    broken.write_bytes(b"\x7fELF and no more")
    found = open_library(broken, None)
    assert found.library is None
    assert "does not load" in found.problem
    assert "not built" in open_library(tmp_path / "none.so", None).problem


def test_every_change_of_a_source_changes_the_hash(tmp_path: Path) -> None:
    assert sources_hash(tmp_path / "none") is None
    (tmp_path / "a.cpp").write_text("int a;")
    (tmp_path / "b.hpp").write_text("int b;")
    first = sources_hash(tmp_path)
    (tmp_path / "notes.txt").write_text("not compiled")
    assert sources_hash(tmp_path) == first
    (tmp_path / "b.hpp").write_text("int c;")
    assert sources_hash(tmp_path) != first


@pytest.mark.usefixtures("newer_sources")
def test_with_a_stale_library_models_run_on_torch_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.WARNING, logger="penstock"):
        assert main(["collect-env", "--json"]) == 0
    assert STALE in json.loads(capsys.readouterr().out)["cpu_library"]
    assert "pip install -e ." in caplog.text
    folder = make_checkpoint(tmp_path, "llama")
    with open_llm(folder) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        (output,) = llm.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3
        model = llm.engine.executor.worker.model  # type: ignore[attr-defined]
        assert model.model.layers[0].fused is None
