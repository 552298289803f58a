"""Maps a GGUF file to Hugging Face terms: its configuration and its tensors' names.

All other code sees only Hugging Face keys and names. `architectures` lists the supported files and
their tensor names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.loading.gguf.architecture import GGUFArchitecture
from penstock.loading.gguf.architectures import architecture_of
from penstock.loading.gguf.end_tokens import end_token_ids
from penstock.loading.gguf.file import GGUFFile
from penstock.loading.gguf.mapping import MappedTensor, apply_rules
from penstock.loading.gguf.metadata import LAYER_OF_TENSOR, Metadata, fail, find_tensor
from penstock.loading.gguf.rope import rope_scaling
from penstock.loading.gguf.shapes import check_sizes


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

    def is_left_out(name: str) -> bool:
        layer = LAYER_OF_TENSOR.match(name)
        is_extra = layer is not None and int(layer.group(1)) >= config["num_hidden_layers"]
        return is_extra or name in architecture.tables

    return apply_rules(
        file,
        architecture.rules,
        config,
        is_left_out,
        f"the architecture {architecture.model_type!r}",
    )


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
