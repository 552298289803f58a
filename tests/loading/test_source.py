from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_builder import write_gguf
from safetensors.torch import save_file

from penstock.config import LoadConfig, ModelConfig
from penstock.loading.source import ModelSource, resolve_source
from penstock.protocol.errors import ModelError

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file({"a": torch.arange(4.0)}, path / "model.safetensors")
    return path


def resolve(path: Path | str, load_format: str = "auto", **kwargs: Any) -> ModelSource:
    load = LoadConfig(load_format=load_format)  # type: ignore[arg-type]
    return resolve_source(ModelConfig(model=str(path)), load, **kwargs)


def test_a_folder_gives_its_configuration_and_tensor_file(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    source = resolve(folder)
    assert source.kind == "folder"
    assert source.path == folder
    assert source.name == str(folder)
    assert source.config == CONFIG
    assert source.generation_config == {"eos_token_id": [1, 2]}
    assert source.tensor_files == (folder / "model.safetensors",)
    assert source.gguf is None


def test_a_folder_without_generation_config_gives_an_empty_one(folder: Path) -> None:
    assert resolve(folder).generation_config == {}


def test_a_gguf_file_gives_its_metadata(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    source = resolve(tmp_path / "model.gguf")
    assert source.kind == "gguf"
    assert source.config["model_type"] == "llama"
    assert source.generation_config == {"eos_token_id": 3}
    assert source.gguf is not None
    assert source.tensor_files == (source.path,)


def test_settings_are_overridden_object_by_object(folder: Path, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1.0}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "rope_parameters": rope}))
    write_gguf(tmp_path / "model.gguf")
    overrides = {"hidden_size": 16, "rope_parameters": {"rope_theta": 5.0}, "new": [1]}
    for path in (folder, tmp_path / "model.gguf"):
        plain = resolve(path)
        model = ModelConfig(model=str(path), hf_overrides=overrides)
        source = resolve_source(model, LoadConfig())
        wanted = {**plain.config.get("rope_parameters", {}), "rope_theta": 5.0}
        assert source.config == {**plain.config, **overrides, "rope_parameters": wanted}
        assert source.fingerprint != plain.fingerprint  # caches of the other do not serve this one


def test_a_folder_with_one_gguf_file_stands_for_that_file(tmp_path: Path, folder: Path) -> None:
    write_gguf(tmp_path / "one.gguf")
    assert resolve(tmp_path).path == tmp_path / "one.gguf"
    shutil.copy(tmp_path / "one.gguf", folder)
    assert resolve(folder).kind == "folder"
    assert resolve(folder, "gguf").path == folder / "one.gguf"


def test_shards_come_in_the_order_of_the_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    for name in ("x", "y"):
        save_file({name: torch.ones(2)}, folder / f"{name}.safetensors")
    index = {"weight_map": {"y": "y.safetensors", "x": "x.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [path.name for path in resolve(folder).tensor_files] == [
        "y.safetensors",
        "x.safetensors",
    ]


@pytest.mark.parametrize(
    ("index", "complaint"),
    [
        ({"weight_map": {"x": "gone.safetensors"}}, r"names 'gone\.safetensors', but .* missing"),
        ({"weight_map": {"x": "../model.safetensors"}}, "not the name of a file beside it"),
        ({"weight_map": {"x": ["model.safetensors"]}}, "not the name of a file beside it"),
        ({"weight_map": {}}, "no weight_map"),
        ({}, "no weight_map"),
        ([], "must contain a JSON object, got list"),
    ],
    ids=str,
)
def test_a_broken_index_is_refused_by_name(folder: Path, index: Any, complaint: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=complaint) as raised:
        resolve(folder)
    assert "model.safetensors.index.json" in str(raised.value)


def test_a_missing_path_is_refused_with_what_a_model_may_be(tmp_path: Path) -> None:
    for missing in (tmp_path / "nothing", "missing.gguf", "x" * 5000, "gpt2"):
        with pytest.raises(ModelError, match=r"no such file or folder.*org/name.*pypi:"):
            resolve(missing)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json and no \.gguf"):
        resolve(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]", '"text"', "\ud800".encode("utf-8", "surrogatepass")])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_config_that_is_not_json_is_refused_by_name(
    folder: Path, name: str, text: str | bytes
) -> None:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ModelError, match=rf"/{name}: (not valid JSON|must contain a JSON object)"):
        resolve(folder)


def test_a_folder_without_tensors_is_refused_unless_weights_are_dummies(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \.safetensors files.*--load-format dummy"):
        resolve(folder)
    assert resolve(folder, "dummy").tensor_files == ()


def test_pickles_are_refused_unless_asked_for(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"a": torch.ones(1)}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.*--load-format pt"):
        resolve(folder)
    assert resolve(folder, "pt").tensor_files == (folder / "pytorch_model.bin",)


def test_a_format_that_does_not_fit_the_files_is_refused(tmp_path: Path, folder: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match="load_format safetensors reads folders"):
        resolve(tmp_path / "model.gguf", "safetensors")
    with pytest.raises(ModelError, match=r"no \.gguf file, which load_format gguf"):
        resolve(folder, "gguf")
    with pytest.raises(ModelError, match=r"no pytorch_model\.bin"):
        resolve(folder, "pt")
    shutil.copy(tmp_path / "model.gguf", tmp_path / "other.gguf")
    with pytest.raises(ModelError, match=r"several models; .*/model\.gguf, .*/other\.gguf"):
        resolve(tmp_path)


def test_a_file_that_is_no_gguf_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="not a GGUF file"):
        resolve(folder / "model.safetensors")


class FakeHub:
    def __init__(self, answer: Path | Exception) -> None:
        self.answer = answer
        self.calls: list[tuple[str, str | None, list[str], str | None]] = []

    def __call__(
        self, repo_id: str, revision: str | None, patterns: Sequence[str], cache: str | None
    ) -> str:
        self.calls.append((repo_id, revision, list(patterns), cache))
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)


def test_a_hub_id_is_fetched_with_only_the_files_needed(folder: Path) -> None:
    hub = FakeHub(folder)
    model = ModelConfig(model="org/name", revision="v1")
    source = resolve_source(model, LoadConfig(download_dir="/cache"), snapshot=hub)
    assert source.path == folder
    assert source.name == "org/name"
    ((repo_id, revision, patterns, cache),) = hub.calls
    assert (repo_id, revision, cache) == ("org/name", "v1", "/cache")
    assert "*.safetensors" in patterns
    assert "*.bin" not in patterns
    resolve("org/name", "dummy", snapshot=hub)
    assert "*.safetensors" not in hub.calls[-1][2]


def test_an_unreachable_hub_is_explained_with_the_way_round_it() -> None:
    hub = FakeHub(ConnectionError("no route\nto host"))
    with pytest.raises(ModelError, match=r"'org/name' .*no route to host.*offline.*folder"):
        resolve("org/name", snapshot=hub)


def test_a_hub_id_cannot_be_one_gguf_file() -> None:
    with pytest.raises(ModelError, match=r"download the \.gguf file"):
        resolve("org/name", "gguf", snapshot=FakeHub(AssertionError()))


def test_a_folder_named_like_a_hub_id_is_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent.parent)
    name = f"{folder.parent.name}/{folder.name}"
    assert resolve(name, snapshot=FakeHub(AssertionError())).path == folder


def test_a_copy_keeps_the_fingerprint_and_other_weights_change_it(folder: Path) -> None:
    first = resolve(folder).fingerprint
    copy = folder.parent / "copy"
    shutil.copytree(folder, copy)
    assert resolve(copy).fingerprint == first
    save_file({"a": torch.arange(4.0) + 1}, copy / "model.safetensors")
    assert resolve(copy).fingerprint != first
    (folder / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": 1.0}))
    assert resolve(folder).fingerprint != first


def test_the_fingerprint_sees_a_change_in_the_middle_of_a_large_file(folder: Path) -> None:
    weights = torch.zeros(500, 1000)
    save_file({"a": weights}, folder / "model.safetensors")
    first = resolve(folder).fingerprint
    weights[200:210] = 1  # 40 kB of 2 MB
    save_file({"a": weights}, folder / "model.safetensors")
    assert resolve(folder).fingerprint != first


def test_finding_a_model_imports_neither_torch_nor_the_hub(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    code = (
        "import sys; from penstock.config import LoadConfig, ModelConfig; "
        "from penstock.loading.source import resolve_source; "
        "resolve_source(ModelConfig(model=sys.argv[1]), LoadConfig()); "
        "print({'torch', 'huggingface_hub', 'transformers', 'gguf'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "model.gguf")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "set()"
