"""What is read of sentence-transformers' files, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.loading.sentence_transformers import DenseFile, read_sentence_transformers
from penstock.protocol.errors import ModelError

POOLING = {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True}
DENSE = {
    "in_features": 8,
    "out_features": 4,
    "bias": True,
    "activation_function": "torch.nn.modules.activation.Tanh",
}


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def write_model(folder: Path, *modules: str, **files: Any) -> Path:
    """Modules behind the transformer, each in the folder that sentence-transformers gives it."""
    entries = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    ]
    for index, name in enumerate(modules, start=1):
        path = f"{index}_{name}"
        kind = f"sentence_transformers.models.{name}"
        entries.append({"idx": index, "name": str(index), "path": path, "type": kind})
        content = {"Pooling": POOLING, "Dense": DENSE}.get(name)
        if content is not None:
            write(folder / path / "config.json", content)
        if name == "Dense":
            (folder / path / "model.safetensors").write_bytes(b"")
    write(folder / "modules.json", entries)
    for name, content in files.items():
        write(folder / f"{name}.json", content)
    return folder


def test_a_folder_without_modules_is_no_sentence_transformer(tmp_path: Path) -> None:
    assert read_sentence_transformers(tmp_path) is None


def test_pooling_dense_layers_and_normalization_are_read(tmp_path: Path) -> None:
    found = read_sentence_transformers(write_model(tmp_path, "Pooling", "Dense", "Normalize"))
    assert found is not None
    assert (found.pooling, found.normalize) == ("MEAN", True)
    assert found.dense == (DenseFile(tmp_path / "2_Dense", 8, 4, True, "tanh"),)
    assert (found.max_seq_length, found.lower_case, dict(found.prompts)) == (None, False, {})


def test_lengths_lower_case_and_prompts_are_read(tmp_path: Path) -> None:
    prompts = {"query": "query: ", "document": ""}
    folder = write_model(
        tmp_path,
        "Pooling",
        sentence_bert_config={"max_seq_length": 256, "do_lower_case": True},
        config_sentence_transformers={"prompts": prompts, "default_prompt_name": "query"},
    )
    found = read_sentence_transformers(folder)
    assert found is not None
    assert (found.max_seq_length, found.lower_case, found.normalize) == (256, True, False)
    assert (found.prompts, found.default_prompt_name) == (prompts, "query")


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "CLS"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "LAST"),
        ({"embedding_dimension": 8, "pooling_mode": "mean"}, "MEAN"),
        ({"embedding_dimension": 8, "pooling_mode": ["cls"]}, "CLS"),
    ],
)
def test_the_pooling_is_read_as_old_and_new_files_have_it(
    tmp_path: Path, config: dict[str, Any], pooling: str
) -> None:
    write_model(tmp_path, "Pooling")
    write(tmp_path / "1_Pooling" / "config.json", config)
    found = read_sentence_transformers(tmp_path)
    assert found is not None
    assert found.pooling == pooling


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"pooling_mode_max_tokens": True}, "the pooling must be one of"),
        ({"pooling_mode": ["cls", "mean"]}, "the pooling must be one of"),
        ({"pooling_mode": {"cls": 1}}, "the pooling must be one of"),
        ({"pooling_mode": [["cls"]]}, "the pooling must be one of"),
        ({}, "the pooling must be one of"),
        ({"pooling_mode": "cls", "include_prompt": False}, "include_prompt=false"),
    ],
)
def test_a_pooling_that_is_not_supported_names_its_file(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    write_model(tmp_path, "Pooling")
    write(tmp_path / "1_Pooling" / "config.json", config)
    with pytest.raises(ModelError, match=rf"1_Pooling.config\.json: .*{message}"):
        read_sentence_transformers(tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"activation_function": "river.Wave"}, "activation_function 'river.Wave'"),
        ({"use_residual": True}, "use_residual=True is not supported"),
        ({"module_input_name": "token_embeddings"}, "module_input_name"),
        ({"in_features": 0}, "in_features must be an integer of at least 1, got 0"),
    ],
)
def test_a_dense_layer_that_is_not_supported_names_its_file(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    write_model(tmp_path, "Pooling", "Dense")
    write(tmp_path / "2_Dense" / "config.json", {**DENSE, **changed})
    with pytest.raises(ModelError, match=rf"2_Dense.config\.json: .*{message}"):
        read_sentence_transformers(tmp_path)


def test_a_dense_layer_without_safetensors_names_its_folder(tmp_path: Path) -> None:
    write_model(tmp_path, "Pooling", "Dense")
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"2_Dense: has no model\.safetensors"):
        read_sentence_transformers(tmp_path)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (("Pooling", "WordWeights"), "the module WordWeights is not supported"),
        (("Pooling", "Normalize", "Dense"), "a Dense module behind Normalize"),
        (("Normalize",), "number 1 is Normalize"),
        ((), "there is no Pooling module"),
    ],
)
def test_modules_that_are_not_supported_are_named(
    tmp_path: Path, modules: tuple[str, ...], message: str
) -> None:
    write_model(tmp_path, *modules)
    with pytest.raises(ModelError, match=rf"modules\.json: .*{message}"):
        read_sentence_transformers(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        {},
        [3],
        [{"path": ""}],
        [{"type": "Transformer", "path": "/etc"}],
        [{"type": "Transformer", "path": "../x"}],
    ],
)
def test_modules_that_make_no_sense_are_refused(tmp_path: Path, content: Any) -> None:
    write(tmp_path / "modules.json", content)
    with pytest.raises(ModelError, match=r"modules\.json: "):
        read_sentence_transformers(tmp_path)


def test_a_default_prompt_that_is_not_there_is_refused(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "q: "}, "default_prompt_name": "passage"}
    write_model(tmp_path, "Pooling", config_sentence_transformers=prompts)
    with pytest.raises(ModelError, match=r"default_prompt_name 'passage' is not among .* query"):
        read_sentence_transformers(tmp_path)
