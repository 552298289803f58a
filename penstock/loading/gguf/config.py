"""What a GGUF file says in Hugging Face's words: its configuration and its tensors' names.

Everything above sees only Hugging Face keys and names. Which files are read, and what their tensors
are called, is in `architectures`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.loading.gguf.architectures import (
    LONG_FACTORS,
    ROPE_FREQS,
    Architecture,
    SplitExperts,
    Transform,
    UnpermuteRope,
    architecture_of,
)
from penstock.loading.gguf.file import GGUFFile, GGUFTensor
from penstock.loading.gguf.metadata import Metadata, fail, find_tensor
from penstock.loading.gguf.rope import fit_llama3_scaling

_LAYER = re.compile(r"^blk\.(0|[1-9][0-9]{0,5})\.")


@dataclass(frozen=True)
class MappedTensor:
    """A tensor of a GGUF file under its Hugging Face name."""

    name: str
    tensor: GGUFTensor
    transform: Transform | None


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """The config.json that the model in `file` would have.

    Sizes are checked against the tensors, so nobody builds a model from a corrupt number.
    Raises ModelError for an architecture that is not in ARCHITECTURES.
    """
    architecture = architecture_of(file)
    metadata = Metadata(file)
    embedding = find_tensor(file, "token_embd.weight", num_dims=2)
    heads = metadata.integer("attention.head_count")
    hidden_size = metadata.integer("embedding_length")
    head_dim = metadata.integer("attention.key_length", default=hidden_size // heads)
    config: dict[str, Any] = {
        "architectures": [architecture.hf_class],
        "model_type": architecture.model_type,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        architecture.eps_key: metadata.number(_eps_key(architecture)),
        "rope_theta": metadata.number("rope.freq_base", default=10000.0),
        "max_position_embeddings": metadata.integer("context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": _dtype(file),
    }
    for key in ("bos", "eos"):
        token_id = metadata.token_id(key)
        if token_id is not None:
            config[f"{key}_token_id"] = token_id
    config["rope_scaling"] = _rope_scaling(metadata, config)
    config |= architecture.settings(metadata)
    _set_rotated_part(metadata, config, architecture)
    _check_sizes(file, config, architecture)
    return config


def generation_config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """The generation_config.json that the model would have: which tokens end an answer."""
    metadata = Metadata(file)
    ends = [metadata.token_id(key) for key in ("eos", "eot", "eom")]
    ids = list(dict.fromkeys(token_id for token_id in ends if token_id is not None))
    if not ids:
        return {}
    return {"eos_token_id": ids[0] if len(ids) == 1 else ids}


def map_tensors(file: GGUFFile, config: Mapping[str, Any]) -> list[MappedTensor]:
    """Every tensor that is a parameter, under its Hugging Face name, in file order.

    Raises ModelError for tensors that the architecture does not know.
    """
    architecture = architecture_of(file)
    rules = architecture.rules
    mapped: list[MappedTensor] = []
    unknown: list[str] = []
    for tensor in file.tensors.values():
        stem, _, kind = tensor.name.rpartition(".")
        layer = _LAYER.match(tensor.name)
        number = layer.group(1) if layer else ""
        rule = rules.get(_LAYER.sub("blk.{n}.", stem))
        if tensor.name in architecture.tables:
            continue
        if rule is None or kind not in ("weight", "bias"):
            unknown.append(tensor.name)
            continue
        if isinstance(rule.transform, UnpermuteRope):
            _check_permutable(file, tensor, config[rule.transform.heads])
        elif isinstance(rule.transform, SplitExperts) and len(tensor.shape) != 3:
            fail(file, f"tensor {tensor.name!r} must have 3 dimensions, got {list(tensor.shape)}")
        name = f"{rule.name.replace('{n}', number)}.{kind}"
        mapped.append(MappedTensor(name, tensor, rule.transform))
    if unknown:
        fail(
            file,
            f"{len(unknown)} tensors that the architecture {architecture.model_type!r} does not "
            f"have: {', '.join(sorted(unknown)[:4])}{' ...' if len(unknown) > 4 else ''}",
        )
    return mapped


def _dtype(file: GGUFFile) -> str:
    """The type to compute in where memory matters: that of the weights, bfloat16 for blocks."""
    types = {tensor.type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if types == {"F32"}:
        return "float32"
    return "float16" if types == {"F16"} else "bfloat16"


def _eps_key(architecture: Architecture) -> str:
    is_rms = architecture.eps_key == "rms_norm_eps"
    return "attention.layer_norm_rms_epsilon" if is_rms else "attention.layer_norm_epsilon"


def _set_rotated_part(
    metadata: Metadata, config: dict[str, Any], architecture: Architecture
) -> None:
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
    if metadata.get("expert_count") and architecture.mlp != "experts":
        fail(
            metadata.file,
            f"a mixture of {metadata.get('expert_count')} experts is not supported for the "
            f"GGUF architecture {metadata.prefix!r}",
        )


def _check_sizes(file: GGUFFile, config: Mapping[str, Any], architecture: Architecture) -> None:
    """Metadata and tensors must tell the same story."""
    layers = {int(m.group(1)) for name in file.tensors if (m := _LAYER.match(name))}
    num_layers = config["num_hidden_layers"]
    if len(layers) != num_layers or max(layers) != num_layers - 1:
        fail(file, f"metadata says {num_layers} layers, but there are tensors of {len(layers)}")
    for name, shape in _expected_shapes(file, config, architecture).items():
        found = find_tensor(file, name, len(shape)).shape
        if found != shape:
            fail(
                file,
                f"tensor {name!r} has the shape {list(found)}, but by the metadata it must be "
                f"{list(shape)}",
            )


def _expected_shapes(
    file: GGUFFile, config: Mapping[str, Any], architecture: Architecture
) -> dict[str, tuple[int, ...]]:
    """Of the embedding and the first layer: the others are checked when they are loaded."""
    hidden, head_dim, size = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    q_rows = config["num_attention_heads"] * head_dim
    k_rows = config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (config["vocab_size"], hidden)}
    if "blk.0.attn_qkv.weight" in file.tensors:
        shapes["blk.0.attn_qkv.weight"] = (q_rows + 2 * k_rows, hidden)
    else:
        shapes["blk.0.attn_q.weight"] = (q_rows, hidden)
        shapes["blk.0.attn_k.weight"] = (k_rows, hidden)
    if architecture.mlp == "experts":
        count = config.get("num_experts") or config["num_local_experts"]
        size = config.get("moe_intermediate_size") or size
        shapes["blk.0.ffn_gate_exps.weight"] = (count, size, hidden)
    elif architecture.mlp == "gated":
        shapes["blk.0.ffn_gate.weight"] = (size, hidden)
    else:
        shapes["blk.0.ffn_up.weight"] = (2 * size if architecture.mlp == "fused" else size, hidden)
    return shapes


def _check_permutable(file: GGUFFile, tensor: GGUFTensor, heads: int) -> None:
    is_plain_bias = len(tensor.shape) == 1 and tensor.type.block_size == 1
    if not (is_plain_bias or len(tensor.shape) == 2) or tensor.shape[0] % (2 * heads):
        fail(
            file,
            f"tensor {tensor.name!r} ({tensor.type.name}, shape {list(tensor.shape)}) does not "
            f"split into {heads} heads",
        )


def _rope_scaling(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any] | None:
    if ROPE_FREQS in metadata.file.tensors:
        return _llama3_scaling(metadata.file, config)
    kind = metadata.get("rope.scaling.type")
    if kind == "longrope" and LONG_FACTORS in metadata.file.tensors:
        return None  # the architecture's settings have it
    if kind not in (None, "none", "linear", "yarn"):
        fail(
            metadata.file,
            f"{metadata.prefix}.rope.scaling.type {kind!r} is not supported; "
            "supported are none, linear, yarn, and Llama 3's table rope_freqs.weight",
        )
    if kind == "yarn":
        return _yarn_scaling(metadata)
    if kind == "linear":
        return {"rope_type": "linear", "factor": metadata.number("rope.scaling.factor")}
    if kind is None and metadata.get("rope.scale_linear") is not None:  # files of 2023
        return {"rope_type": "linear", "factor": metadata.number("rope.scale_linear")}
    return None


def _yarn_scaling(metadata: Metadata) -> dict[str, Any]:
    factor = metadata.number("rope.scaling.factor")
    original = metadata.integer("rope.scaling.original_context_length")
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
    }
    for key in ("beta_fast", "beta_slow"):
        if metadata.get(f"rope.scaling.yarn_{key}") is not None:
            scaling[key] = metadata.number(f"rope.scaling.yarn_{key}")
    if metadata.get("rope.scaling.attn_factor") is not None:
        # ggml multiplies this onto yarn's own factor; Hugging Face's key replaces it
        own = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        scaling["attention_factor"] = metadata.number("rope.scaling.attn_factor") * own
    return scaling


def _llama3_scaling(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Any]:
    tensor = find_tensor(file, ROPE_FREQS, num_dims=1)
    half = config["head_dim"] // 2
    if tensor.type.name != "F32" or tensor.shape != (half,):
        fail(
            file,
            f"tensor {ROPE_FREQS!r} must be F32 of shape [{half}], "
            f"got {tensor.type.name} of {list(tensor.shape)}",
        )
    scaling = fit_llama3_scaling(file.view(ROPE_FREQS).view("<f4"), config["rope_theta"])
    if scaling is None:
        fail(file, f"tensor {ROPE_FREQS!r} is not a table of Llama 3's rope scaling")
    return scaling
