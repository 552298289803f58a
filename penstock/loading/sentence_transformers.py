"""Reads sentence-transformers' files: how a model pools, and which texts it takes.

This module does not import torch: the API process reads prompts and lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.loading.source import MODULES_FILE, read_json, read_json_value
from penstock.protocol.errors import ModelError

PROMPTS_FILE = "config_sentence_transformers.json"
# Settings of the transformer; the first is the name of older versions.
TEXT_FILES = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)

PoolingName = Literal["CLS", "LAST", "MEAN"]
ActivationName = Literal["identity", "tanh", "relu", "gelu", "silu", "sigmoid"]

_POOLING: dict[str, PoolingName] = {"cls": "CLS", "lasttoken": "LAST", "mean": "MEAN"}
# The modes in files before version 6, one flag each.
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS: dict[str, ActivationName] = {
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}


@dataclass(frozen=True)
class DenseFile:
    """A dense layer after pooling, and where its weights are."""

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: ActivationName


@dataclass(frozen=True)
class SentenceTransformer:
    """What comes before and after the transformer."""

    pooling: PoolingName
    include_prompt: bool  # whether a prompt's tokens are pooled, too
    normalize: bool
    dense: tuple[DenseFile, ...]
    max_seq_length: int | None  # tokens, including special ones; longer texts are truncated
    lower_case: bool
    prompts: Mapping[str, str]  # text before the input, by name
    default_prompt_name: str | None
    truncate_dim: int | None  # embeddings are cut to so many numbers, after normalization


def read_sentence_transformers(folder: Path) -> SentenceTransformer | None:
    """The settings in a model's folder; None without a modules.json.

    Raises ModelError, which names the file, for unsupported settings: vectors would differ.
    """
    path = folder / MODULES_FILE
    if not path.exists():
        return None
    pooling: PoolingName | None = None
    include_prompt, normalize, dense = True, False, []
    text_folder = folder
    for index, (kind, module_folder) in enumerate(_modules(path)):
        if (kind == "Transformer") != (index == 0) or (kind == "Pooling") != (index == 1):
            raise ModelError(
                f"{path}: modules must be Transformer, Pooling, then Dense and Normalize, "
                f"but number {index} is {kind}"
            )
        if index == 0:
            text_folder = module_folder
        elif index == 1:
            pooling, include_prompt = _pooling(module_folder / "config.json")
        elif kind == "Normalize":
            normalize = True
        elif kind == "Dense":
            if normalize:
                raise ModelError(f"{path}: a Dense module behind Normalize is not supported")
            dense.append(_dense(module_folder))
        else:
            raise ModelError(
                f"{path}: the module {kind} is not supported, only Transformer, Pooling, Dense "
                "and Normalize"
            )
    if pooling is None:
        raise ModelError(f"{path}: there is no Pooling module")
    max_seq_length, lower_case = _text_settings(text_folder)
    prompts, default_prompt_name, truncate_dim = _settings(folder / PROMPTS_FILE)
    return SentenceTransformer(
        pooling,
        include_prompt,
        normalize,
        tuple(dense),
        max_seq_length,
        lower_case,
        prompts,
        default_prompt_name,
        truncate_dim,
    )


def module_folders(folder: Path) -> list[Path]:
    """The folders of a model's modules, in order. Raises ModelError as the reader does."""
    return [inner for _, inner in _modules(folder / MODULES_FILE)]


def _modules(path: Path) -> list[tuple[str, Path]]:
    """The class and folder of each module, in order."""
    modules = read_json_value(path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{path}: must be a list of modules")
    found = []
    for module in modules:
        kind, inner = module.get("type"), module.get("path", "")
        if not isinstance(kind, str) or not isinstance(inner, str):
            raise ModelError(f"{path}: a module needs a type and a path, got {module!r:.80}")
        if inner.startswith("/") or ".." in Path(inner).parts:
            raise ModelError(f"{path}: the path {inner!r:.80} leads out of the model's folder")
        found.append((kind.rpartition(".")[2], path.parent / inner))
    return found


def _object(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ModelError(f"{path}: is missing, but {MODULES_FILE} has a module there")
    return read_json(path)


def _pooling(path: Path) -> tuple[PoolingName, bool]:
    """The mode, and whether a prompt's tokens are pooled."""
    content = _object(path)
    given = content.get("pooling_mode")
    if given is None:
        modes = [name for flag, name in _POOLING_FLAGS.items() if content.get(flag) is True]
    else:
        modes = [given] if isinstance(given, str) else given
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in list(_POOLING):
        raise ModelError(
            f"{path}: the pooling must be one of {', '.join(_POOLING)}, got {modes!r:.120}"
        )
    include_prompt = content.get("include_prompt", True) is True
    if not include_prompt and modes[0] == "cls":  # versions differ: the first token, or the text's
        raise ModelError(f"{path}: include_prompt=false is not supported with cls pooling")
    return _POOLING[modes[0]], include_prompt


def _dense(folder: Path) -> DenseFile:
    path = folder / "config.json"
    content = _object(path)
    name = str(content.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = _ACTIVATIONS.get(name.rpartition(".")[2])
    if activation is None or not name.startswith("torch."):
        raise ModelError(
            f"{path}: activation_function {name!r:.80} is not supported, only those of torch.nn: "
            f"{', '.join(_ACTIVATIONS)}"
        )
    for key, expected in (
        ("module_input_name", "sentence_embedding"),
        ("module_output_name", "sentence_embedding"),
        ("use_residual", False),
    ):
        if content.get(key, expected) not in (expected, None):
            raise ModelError(f"{path}: {key}={content[key]!r:.80} is not supported")
    if not (folder / "model.safetensors").exists():
        raise ModelError(
            f"{folder}: has no model.safetensors; convert pytorch_model.bin to safetensors"
        )
    return DenseFile(
        folder,
        _size(path, content, "in_features"),
        _size(path, content, "out_features"),
        content.get("bias", True) is True,
        activation,
    )


def _size(path: Path, content: Mapping[str, Any], key: str) -> int:
    value = content.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise ModelError(f"{path}: {key} must be an integer of at least 1, got {value!r:.80}")
    return value


def _text_settings(folder: Path) -> tuple[int | None, bool]:
    path = next((folder / name for name in TEXT_FILES if (folder / name).exists()), None)
    if path is None:
        return None, False
    content = _object(path)
    has_length = content.get("max_seq_length") is not None
    length = _size(path, content, "max_seq_length") if has_length else None
    return length, content.get("do_lower_case", False) is True


def _settings(path: Path) -> tuple[dict[str, str], str | None, int | None]:
    """The prompts, the name of the default one, and how many numbers an embedding has."""
    if not path.exists():
        return {}, None, None
    content = _object(path)
    prompts, default = content.get("prompts") or {}, content.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{path}: prompts must be texts by name, got {prompts!r:.80}")
    if default is not None and default not in prompts:
        raise ModelError(
            f"{path}: default_prompt_name {default!r:.80} is not among the prompts "
            f"{', '.join(prompts) or '(there are none)'}"
        )
    is_cut = content.get("truncate_dim") is not None
    return prompts, default, _size(path, content, "truncate_dim") if is_cut else None
