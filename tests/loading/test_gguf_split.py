"""A model that is split into several GGUF files is read as one."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from gguf_builder import write_gguf

from penstock.config import LoadConfig, ModelConfig
from penstock.loading.checkpoint import open_checkpoint
from penstock.loading.source import ModelSource, resolve_source
from penstock.protocol.errors import ModelError

NUM_FILES = 4  # of 20 tensors, six a file


def resolve(path: Path) -> ModelSource:
    return resolve_source(ModelConfig(model=str(path)), LoadConfig())


def part(folder: Path, number: int, count: int = NUM_FILES) -> Path:
    return folder / f"model-{number:05}-of-{count:05}.gguf"


@pytest.fixture
def split(tmp_path: Path) -> Path:
    folder = tmp_path / "split"
    folder.mkdir()
    write_gguf(folder / "model.gguf", tensors_a_file=6)
    assert len(list(folder.iterdir())) == NUM_FILES
    return folder


@pytest.mark.parametrize("name", ["", "model-00001-of-00004.gguf"])
def test_a_split_model_has_the_tensors_of_all_its_files(
    split: Path, tmp_path: Path, name: str
) -> None:
    write_gguf(tmp_path / "whole.gguf")
    source, whole = resolve(split / name), resolve(tmp_path / "whole.gguf")
    assert source.config == whole.config
    assert source.tensor_files == tuple(part(split, number) for number in range(1, 5))
    own = dict(open_checkpoint(source, LoadConfig()).tensors())
    expected = dict(open_checkpoint(whole, LoadConfig()).tensors())
    assert own.keys() == expected.keys()
    for tensor, other in expected.items():
        assert np.array_equal(own[tensor], other), tensor


def test_another_file_changes_the_fingerprint(split: Path, tmp_path: Path) -> None:
    before = resolve(split).fingerprint
    other = tmp_path / "other"
    other.mkdir()
    write_gguf(other / "model.gguf", tensors_a_file=6, seed=1)
    shutil.copy(part(other, 3), part(split, 3))
    assert resolve(split).fingerprint != before


def test_missing_files_are_named(split: Path) -> None:
    part(split, 2).unlink()
    part(split, 4).unlink()
    missing = r"4 files, of which model-00002-of-00004\.gguf, model-00004-of-00004\.gguf are not"
    with pytest.raises(ModelError, match=missing):
        resolve(part(split, 1))


def test_a_later_file_is_refused_with_the_name_of_the_first(split: Path) -> None:
    with pytest.raises(ModelError, match=r"pass the first of the 4 files: model-00001-of-00004"):
        resolve(part(split, 3))


def test_a_file_under_another_name_is_refused_with_the_right_one(split: Path) -> None:
    part(split, 1).rename(split / "renamed.gguf")
    with pytest.raises(ModelError, match=r"whose name must end in -00001-of-00004\.gguf"):
        resolve(split / "renamed.gguf")


def test_files_that_do_not_belong_together_are_refused(split: Path) -> None:
    shutil.copy(part(split, 2), part(split, 3))
    with pytest.raises(ModelError, match=r"must be file 2 of 4 .* but says \(1, 4\)"):
        resolve(part(split, 1))


def test_files_of_another_split_do_not_add_up(split: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_gguf(other / "model.gguf", tensors_a_file=5)
    shutil.copy(part(other, 2), part(split, 2))
    with pytest.raises(ModelError, match=r"tensor .* is in another of the 4 files, too"):
        resolve(part(split, 1))


def test_two_split_models_in_a_folder_are_listed_by_their_first_files(split: Path) -> None:
    for number in range(1, 5):
        other = part(split, number)
        shutil.copy(other, other.with_name(other.name.replace("model", "other")))
    with pytest.raises(ModelError, match=r"one of: \S+model-00001\S+ \S+other-00001\S+$"):
        resolve(split)


def test_what_reads_images_beside_a_model_is_not_taken_for_one(split: Path) -> None:
    shutil.copy(part(split, 1), split / "mmproj-model-f16.gguf")
    source = resolve_source(ModelConfig(model=str(split), mmproj="none"), LoadConfig())
    assert source.path == part(split, 1)
