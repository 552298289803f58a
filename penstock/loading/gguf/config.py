"""Maps a GGUF file to Hugging Face terms: its configuration and its tensors' names.

All other code sees only Hugging Face keys and names. `architectures` lists the supported files and
their tensor names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.loading.gguf.architecture import GGUFArchitecture
from penstock.loading.gguf.architectures import architecture_of
from penstock.loading.gguf.end_tokens import end_token_ids
from penstock.loading.gguf.file import GGUFFile, GGUFTensor
from penstock.loading.gguf.metadata import LAYER_OF_TENSOR, Metadata, fail, find_tensor
from penstock.loading.gguf.rope import rope_scaling
from penstock.loading.gguf.rules import (
    HalfOfKVB,
    Rule,
    SplitExperts,
    Stored,
    Transform,
    UnpermuteRope,
)
from penstock.loading.gguf.shapes import check_sizes


@dataclass(frozen=True)
class MappedTensor:
    """A tensor of a GGUF file under its Hugging Face name."""

    name: str
    tensor: GGUFTensor
    transform: Transform | None
    scale: GGUFTensor | None = None  # factor of the whole tensor, or of each expert


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """The config.json of the model in `file`.

    Sizes are checked against the tensors, so that no model is built from a corrupt number. Raises
    ModelError for an architecture that is not in ARCHITECTURES.
    """
    architecture = architecture_of(file)
    metadata = Metadata(file)
    embedding = find_tensor(file, "token_embd.weight", num_dims=2)
    config: dict[str, Any] = {
        "architectures": [architecture.hf_class],
        "model_type": architecture.model_type,
        "hidden_act": "silu",
        "hidden_size": metadata.integer("embedding_length"),
        "num_hidden_layers": metadata.num_layers(),
        architecture.eps_key: metadata.number(_eps_key(architecture)),
        "max_position_embeddings": metadata.integer("context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": _dtype(file),
    }
    for key in ("bos", "eos"):
        token_id = metadata.token_id(key)
        if token_id is not None:
            config[f"{key}_token_id"] = token_id
    if architecture.attention != "none":
        config |= _attention(metadata, config["hidden_size"])
        config["rope_scaling"] = rope_scaling(metadata, config, architecture)
    if architecture.mlp != "none":
        config["intermediate_size"] = _intermediate_size(metadata, architecture)
    config |= architecture.settings(metadata)
    _set_rotated_part(metadata, config, architecture)
    check_sizes(metadata, config, architecture)
    return config


def _attention(metadata: Metadata, hidden_size: int) -> dict[str, Any]:
    heads = metadata.integer("attention.head_count")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", default=heads),
        "head_dim": metadata.integer("attention.key_length", default=hidden_size // heads),
        "rope_theta": metadata.number("rope.freq_base", default=10000.0),
    }


def _intermediate_size(metadata: Metadata, architecture: GGUFArchitecture) -> int:
    if architecture.mlp == "experts" and not metadata.get("feed_forward_length"):
        return metadata.expert_size()  # there is no other MLP
    return metadata.integer("feed_forward_length")


def generation_config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """The generation_config.json of the model: the tokens that end an output."""
    for key in ("eos", "eot", "eom"):
        Metadata(file).token_id(key)  # raises for an invalid id
    ids = end_token_ids(file.metadata)
    if not ids:
        return {}
    return {"eos_token_id": ids[0] if len(ids) == 1 else ids}


def map_tensors(file: GGUFFile, config: Mapping[str, Any]) -> list[MappedTensor]:
    """Every parameter tensor under its Hugging Face name, in file order.

    Raises ModelError for tensors that the architecture does not know.
    """
    architecture = architecture_of(file)
    mapped: list[MappedTensor] = []
    unknown: list[str] = []
    for tensor in file.tensors.values():
        layer = LAYER_OF_TENSOR.match(tensor.name)
        is_extra = layer is not None and int(layer.group(1)) >= config["num_hidden_layers"]
        if is_extra or tensor.name in architecture.tables or _is_scale(file, tensor):
            continue
        found = _find_rule(architecture.rules, LAYER_OF_TENSOR.sub("blk.{n}.", tensor.name))
        if found is None:
            unknown.append(tensor.name)
            continue
        rule, ending = found
        _check_transform(file, tensor, rule.transform, config)
        name = rule.name.replace("{n}", layer.group(1) if layer else "") + ending
        scale = file.tensors.get(f"{tensor.name.removesuffix('.weight')}.scale")
        mapped.append(MappedTensor(name, tensor, rule.transform, scale))
    if unknown:
        fail(
            file,
            f"{len(unknown)} tensors that the architecture {architecture.model_type!r} does not "
            f"have: {', '.join(sorted(unknown)[:4])}{' ...' if len(unknown) > 4 else ''}",
        )
    return mapped


def _is_scale(file: GGUFFile, tensor: GGUFTensor) -> bool:
    """Whether a tensor only scales another, as in NVFP4, or that other's input."""
    stem, _, kind = tensor.name.rpartition(".")
    return kind in ("scale", "input_scale") and f"{stem}.weight" in file.tensors


def _find_rule(rules: Mapping[str, Rule], name: str) -> tuple[Rule, str] | None:
    """A tensor's rule, and the suffix to append to the rule's name."""
    rule = rules.get(name)
    if rule is not None and rule.is_whole:
        return rule, ""
    stem, _, kind = name.rpartition(".")
    rule = rules.get(stem)
    if rule is None or rule.is_whole or kind not in ("weight", "bias"):
        return None
    return rule, f".{kind}"


def _check_transform(
    file: GGUFFile, tensor: GGUFTensor, transform: Transform | None, config: Mapping[str, Any]
) -> None:
    """Refuse a shape that a transform cannot be reversed for."""
    shape = tensor.shape
    if isinstance(transform, UnpermuteRope):
        heads = config[transform.heads]
        is_plain_bias = len(shape) == 1 and tensor.type.block_size == 1
        if not (is_plain_bias or len(shape) == 2) or shape[0] % (2 * heads):
            fail(
                file,
                f"tensor {tensor.name!r} ({tensor.type.name}, shape {list(shape)}) does not "
                f"split into {heads} heads",
            )
    elif isinstance(transform, SplitExperts):
        dims = 2 if tensor.name.endswith(".bias") else 3
        if len(shape) != dims or shape[1] % len(transform.parts):
            fail(file, f"tensor {tensor.name!r} must have {dims} dimensions, got {list(shape)}")
    elif isinstance(transform, HalfOfKVB) and len(shape) != 3:
        fail(file, f"tensor {tensor.name!r} must have 3 dimensions, got {list(shape)}")
    elif transform is Stored.SQUEEZED and len(shape) != 2:
        fail(file, f"tensor {tensor.name!r} must have 2 dimensions, got {list(shape)}")


def _dtype(file: GGUFFile) -> str:
    """The compute type where memory matters: that of the weights, bfloat16 for quantized ones."""
    types = {tensor.type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if types == {"F32"}:
        return "float32"
    return "float16" if types == {"F16"} else "bfloat16"


def _eps_key(architecture: GGUFArchitecture) -> str:
    is_rms = architecture.eps_key in ("rms_norm_eps", "layer_norm_epsilon")  # the latter is Mamba's
    return "attention.layer_norm_rms_epsilon" if is_rms else "attention.layer_norm_epsilon"


def _set_rotated_part(
    metadata: Metadata, config: dict[str, Any], architecture: GGUFArchitecture
) -> None:
    if metadata.get("expert_count") and architecture.mlp not in ("experts", "mixed"):
        fail(
            metadata.file,
            f"a mixture of {metadata.get('expert_count')} experts is not supported for the "
            f"GGUF architecture {metadata.prefix!r}",
        )
    if architecture.attention in ("latent", "none"):
        return
    head_dim = config["head_dim"]
    rotated = metadata.integer("rope.dimension_count", default=head_dim)
    for key, size in (
        ("attention.value_length", metadata.integer("attention.value_length", default=head_dim)),
        ("rope.dimension_count", head_dim if architecture.partly_rotated else rotated),
    ):
        if size != head_dim:
            fail(
                metadata.file,
                f"{metadata.prefix}.{key} is {size}, but heads have {head_dim} dimensions; heads "
                f"of two sizes and partly rotated heads are not supported for {metadata.prefix}",
            )
    if architecture.partly_rotated:
        config["partial_rotary_factor"] = rotated / head_dim
