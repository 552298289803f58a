"""What a GGUF file says in Hugging Face's words: its configuration and its tensors' names.

Everything above sees only Hugging Face keys and names. What a converter changed on the way into
GGUF is declared here as data (`Rule.transform`) and undone by whoever reads the tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import numpy as np

from penstock.loading.gguf_file import GGUFFile, GGUFTensor
from penstock.loading.gguf_rope import fit_llama3_scaling
from penstock.protocol.errors import ModelError

_LAYER = re.compile(r"^blk\.(0|[1-9][0-9]{0,5})\.")
_ROPE_FREQS = "rope_freqs.weight"  # becomes rope_scaling, not a parameter


@dataclass(frozen=True)
class UnpermuteRope:
    """Rows of each head come as ggml's rope pairs them (2i, 2i+1); wanted: (i, i + dim / 2)."""

    heads: Literal["num_attention_heads", "num_key_value_heads"]  # the config key


@dataclass(frozen=True)
class Rule:
    """Where a GGUF tensor goes; `{n}` in names is the layer. A bias follows its weight."""

    name: str
    transform: UnpermuteRope | None = None


@dataclass(frozen=True)
class MappedTensor:
    """A tensor of a GGUF file under its Hugging Face name."""

    name: str
    tensor: GGUFTensor
    transform: UnpermuteRope | None


@dataclass(frozen=True)
class Architecture:
    """One `general.architecture`: the Hugging Face class it stands for, and its tensors."""

    hf_class: str
    model_type: str
    extra_rules: Mapping[str, Rule] = field(default_factory=dict)
    optional_biases: bool = True  # attention_bias says whether they are there

    @property
    def rules(self) -> dict[str, Rule]:
        return {**_DECODER_RULES, **self.extra_rules}


_DECODER_RULES: dict[str, Rule] = {
    "token_embd": Rule("model.embed_tokens"),
    "output_norm": Rule("model.norm"),
    "output": Rule("lm_head"),
    "blk.{n}.attn_norm": Rule("model.layers.{n}.input_layernorm"),
    "blk.{n}.attn_q": Rule("model.layers.{n}.self_attn.q_proj"),
    "blk.{n}.attn_k": Rule("model.layers.{n}.self_attn.k_proj"),
    "blk.{n}.attn_v": Rule("model.layers.{n}.self_attn.v_proj"),
    "blk.{n}.attn_output": Rule("model.layers.{n}.self_attn.o_proj"),
    "blk.{n}.ffn_norm": Rule("model.layers.{n}.post_attention_layernorm"),
    "blk.{n}.ffn_gate": Rule("model.layers.{n}.mlp.gate_proj"),
    "blk.{n}.ffn_up": Rule("model.layers.{n}.mlp.up_proj"),
    "blk.{n}.ffn_down": Rule("model.layers.{n}.mlp.down_proj"),
}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(  # Mistral's files call themselves llama too
        "LlamaForCausalLM",
        "llama",
        {
            "blk.{n}.attn_q": Rule(
                "model.layers.{n}.self_attn.q_proj", UnpermuteRope("num_attention_heads")
            ),
            "blk.{n}.attn_k": Rule(
                "model.layers.{n}.self_attn.k_proj", UnpermuteRope("num_key_value_heads")
            ),
        },
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", optional_biases=False),
    "qwen3": Architecture(
        "Qwen3ForCausalLM",
        "qwen3",
        {
            "blk.{n}.attn_q_norm": Rule("model.layers.{n}.self_attn.q_norm"),
            "blk.{n}.attn_k_norm": Rule("model.layers.{n}.self_attn.k_norm"),
        },
    ),
}


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """The config.json that the model in `file` would have.

    Sizes are checked against the tensors, so nobody builds a model from a corrupt number.
    Raises ModelError for an architecture that is not in ARCHITECTURES.
    """
    architecture = _architecture(file)
    metadata = _Metadata(file)
    embedding = _tensor(file, "token_embd.weight", num_dims=2)
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
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number("rope.freq_base", default=10000.0),
        "max_position_embeddings": metadata.integer("context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": _dtype(file),
    }
    if architecture.optional_biases:
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    for key in ("bos", "eos"):
        token_id = metadata.token_id(key)
        if token_id is not None:
            config[f"{key}_token_id"] = token_id
    config["rope_scaling"] = _rope_scaling(metadata, config)
    _refuse_what_the_config_cannot_say(metadata, config)
    _check_sizes(file, config)
    return config


def generation_config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """The generation_config.json that the model would have: which tokens end an answer."""
    metadata = _Metadata(file)
    ends = [metadata.token_id(key) for key in ("eos", "eot", "eom")]
    ids = list(dict.fromkeys(token_id for token_id in ends if token_id is not None))
    if not ids:
        return {}
    return {"eos_token_id": ids[0] if len(ids) == 1 else ids}


def map_tensors(file: GGUFFile, config: Mapping[str, Any]) -> list[MappedTensor]:
    """Every tensor that is a parameter, under its Hugging Face name, in file order.

    Raises ModelError for tensors that the architecture does not know.
    """
    architecture = _architecture(file)
    rules = architecture.rules
    mapped: list[MappedTensor] = []
    unknown: list[str] = []
    for tensor in file.tensors.values():
        stem, _, kind = tensor.name.rpartition(".")
        layer = _LAYER.match(tensor.name)
        number = layer.group(1) if layer else ""
        rule = rules.get(_LAYER.sub("blk.{n}.", stem))
        if tensor.name == _ROPE_FREQS:
            continue
        if rule is None or kind not in ("weight", "bias"):
            unknown.append(tensor.name)
            continue
        if rule.transform is not None:
            _check_permutable(file, tensor, config[rule.transform.heads])
        name = f"{rule.name.replace('{n}', number)}.{kind}"
        mapped.append(MappedTensor(name, tensor, rule.transform))
    if unknown:
        _fail(
            file,
            f"{len(unknown)} tensors that the architecture {architecture.model_type!r} does not "
            f"have: {', '.join(sorted(unknown)[:4])}{' ...' if len(unknown) > 4 else ''}",
        )
    return mapped


class _Metadata:
    """Typed access to the keys of the file's own architecture."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.prefix = str(file.metadata.get("general.architecture"))

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.prefix}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            value = default
        if isinstance(value, list) and len(set(map(str, value))) == 1:
            value = value[0]  # one number a layer, all the same
        if type(value) is not int or not 0 < value < 2**31:
            self._fail_value(key, value, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            value = default
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            self._fail_value(key, value, "a positive number")
        # Stored as float32: the shortest decimal is what config.json had (1e-05, not 9.99..e-06).
        return float(str(np.float32(value)))

    def token_id(self, kind: str) -> int | None:
        key = f"tokenizer.ggml.{kind}_token_id"
        value = self.file.metadata.get(key)
        if value is not None and (type(value) is not int or not 0 <= value < 2**31):
            _fail(self.file, f"{key} must be a token id, got {value!r}")
        return value

    def _fail_value(self, key: str, value: Any, wanted: str) -> NoReturn:
        shown = "nothing" if value is None else repr(value)[:80]
        _fail(self.file, f"metadata {self.prefix}.{key} must be {wanted}, got {shown}")


def _architecture(file: GGUFFile) -> Architecture:
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        _fail(
            file,
            f"the GGUF architecture {name!r} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}",
        )
    return ARCHITECTURES[name]


def _tensor(file: GGUFFile, name: str, num_dims: int) -> GGUFTensor:
    tensor = file.tensors.get(name)
    if tensor is None:
        _fail(file, f"tensor {name!r} is missing")
    if len(tensor.shape) != num_dims:
        _fail(file, f"tensor {name!r} must have {num_dims} dimensions, got {list(tensor.shape)}")
    return tensor


def _dtype(file: GGUFFile) -> str:
    """The type to compute in where memory matters: that of the weights, bfloat16 for blocks."""
    types = {tensor.type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if types == {"F32"}:
        return "float32"
    return "float16" if types == {"F16"} else "bfloat16"


def _refuse_what_the_config_cannot_say(metadata: _Metadata, config: Mapping[str, Any]) -> None:
    head_dim = config["head_dim"]
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.integer(key, default=head_dim) != head_dim:
            _fail(
                metadata.file,
                f"{metadata.prefix}.{key} is {metadata.get(key)}, but heads have {head_dim} "
                "dimensions; heads of two sizes and partly rotated heads are not supported",
            )
    if metadata.get("expert_count"):
        _fail(
            metadata.file,
            f"a mixture of {metadata.get('expert_count')} experts is not supported for the "
            f"GGUF architecture {metadata.prefix!r}",
        )


def _check_sizes(file: GGUFFile, config: Mapping[str, Any]) -> None:
    """Metadata and tensors must tell the same story."""
    layers = {int(m.group(1)) for name in file.tensors if (m := _LAYER.match(name))}
    num_layers = config["num_hidden_layers"]
    if len(layers) != num_layers or max(layers) != num_layers - 1:
        _fail(file, f"metadata says {num_layers} layers, but there are tensors of {len(layers)}")
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    expected = {
        "token_embd.weight": (config["vocab_size"], hidden),
        "blk.0.attn_q.weight": (config["num_attention_heads"] * head_dim, hidden),
        "blk.0.attn_k.weight": (config["num_key_value_heads"] * head_dim, hidden),
        "blk.0.ffn_gate.weight": (config["intermediate_size"], hidden),
    }
    for name, shape in expected.items():
        found = _tensor(file, name, num_dims=2).shape
        if found != shape:
            _fail(
                file,
                f"tensor {name!r} has the shape {list(found)}, but by the metadata it must be "
                f"{list(shape)}",
            )


def _check_permutable(file: GGUFFile, tensor: GGUFTensor, heads: int) -> None:
    is_plain_bias = len(tensor.shape) == 1 and tensor.type.block_size == 1
    if not (is_plain_bias or len(tensor.shape) == 2) or tensor.shape[0] % (2 * heads):
        _fail(
            file,
            f"tensor {tensor.name!r} ({tensor.type.name}, shape {list(tensor.shape)}) does not "
            f"split into {heads} heads",
        )


def _rope_scaling(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any] | None:
    if _ROPE_FREQS in metadata.file.tensors:
        return _llama3_scaling(metadata.file, config)
    kind = metadata.get("rope.scaling.type")
    if kind not in (None, "none", "linear", "yarn"):
        _fail(
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


def _yarn_scaling(metadata: _Metadata) -> dict[str, Any]:
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
    tensor = _tensor(file, _ROPE_FREQS, num_dims=1)
    half = config["head_dim"] // 2
    if tensor.type.name != "F32" or tensor.shape != (half,):
        _fail(
            file,
            f"tensor {_ROPE_FREQS!r} must be F32 of shape [{half}], "
            f"got {tensor.type.name} of {list(tensor.shape)}",
        )
    scaling = fit_llama3_scaling(file.view(_ROPE_FREQS).view("<f4"), config["rope_theta"])
    if scaling is None:
        _fail(file, f"tensor {_ROPE_FREQS!r} is not a table of Llama 3's rope scaling")
    return scaling


def _fail(file: GGUFFile, problem: str) -> NoReturn:
    raise ModelError(f"{file.path}: {problem}")
