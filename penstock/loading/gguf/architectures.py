"""The architectures of GGUF files that are read: their tensors' names, and what else they say.

What a converter changed on the way into GGUF is declared as data (`Rule.transform`) and undone by
whoever reads the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.loading.gguf.file import GGUFFile
from penstock.loading.gguf.metadata import Metadata, fail, find_tensor


@dataclass(frozen=True)
class UnpermuteRope:
    """Rows of each head come as ggml's rope pairs them (2i, 2i+1); wanted: (i, i + dim / 2)."""

    heads: Literal["num_attention_heads", "num_key_value_heads"]  # the config key


@dataclass(frozen=True)
class SplitExperts:
    """One tensor has the matrices of all experts; `{e}` in the name is the expert."""


@dataclass(frozen=True)
class AsRow:
    """A matrix of one row comes as a vector."""


Transform = UnpermuteRope | SplitExperts | AsRow


@dataclass(frozen=True)
class Rule:
    """Where a GGUF tensor goes; `{n}` in names is the layer. A bias follows its weight."""

    name: str
    transform: Transform | None = None


ROPE_FREQS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
Settings = Callable[[Metadata], dict[str, Any]]


@dataclass(frozen=True)
class Architecture:
    """One `general.architecture`: the Hugging Face class it stands for, and its tensors."""

    models: str  # for users
    hf_class: str
    model_type: str
    rules: Mapping[str, Rule]
    settings: Settings = field(default=lambda _: {})  # what config.json has beyond the usual
    eps_key: str = "rms_norm_eps"  # in config.json
    mlp: Literal["gated", "fused", "plain", "experts"] = "gated"
    tables: tuple[str, ...] = (ROPE_FREQS,)  # tensors that become settings, not parameters
    partly_rotated: bool = False  # heads whose last dimensions have no positions


_LAYER = "model.layers.{n}."
_EMBEDDINGS = {
    "token_embd": Rule("model.embed_tokens"),
    "output_norm": Rule("model.norm"),
    "output": Rule("lm_head"),
}
_ATTENTION = {
    "blk.{n}.attn_q": Rule(_LAYER + "self_attn.q_proj"),
    "blk.{n}.attn_k": Rule(_LAYER + "self_attn.k_proj"),
    "blk.{n}.attn_v": Rule(_LAYER + "self_attn.v_proj"),
    "blk.{n}.attn_output": Rule(_LAYER + "self_attn.o_proj"),
}
_PERMUTED = {
    "blk.{n}.attn_q": Rule(_LAYER + "self_attn.q_proj", UnpermuteRope("num_attention_heads")),
    "blk.{n}.attn_k": Rule(_LAYER + "self_attn.k_proj", UnpermuteRope("num_key_value_heads")),
}
_HEAD_NORMS = {
    "blk.{n}.attn_q_norm": Rule(_LAYER + "self_attn.q_norm"),
    "blk.{n}.attn_k_norm": Rule(_LAYER + "self_attn.k_norm"),
}
_NORMS = {
    "blk.{n}.attn_norm": Rule(_LAYER + "input_layernorm"),
    "blk.{n}.ffn_norm": Rule(_LAYER + "post_attention_layernorm"),
}
_GATED_MLP = {
    "blk.{n}.ffn_gate": Rule(_LAYER + "mlp.gate_proj"),
    "blk.{n}.ffn_up": Rule(_LAYER + "mlp.up_proj"),
    "blk.{n}.ffn_down": Rule(_LAYER + "mlp.down_proj"),
}
_FUSED_MLP = {
    "blk.{n}.ffn_up": Rule(_LAYER + "mlp.gate_up_proj"),
    "blk.{n}.ffn_down": Rule(_LAYER + "mlp.down_proj"),
}
_EXPERTS = {
    "blk.{n}.ffn_gate_inp": Rule(_LAYER + "mlp.gate"),
    "blk.{n}.ffn_gate_exps": Rule(_LAYER + "mlp.experts.{e}.gate_proj", SplitExperts()),
    "blk.{n}.ffn_up_exps": Rule(_LAYER + "mlp.experts.{e}.up_proj", SplitExperts()),
    "blk.{n}.ffn_down_exps": Rule(_LAYER + "mlp.experts.{e}.down_proj", SplitExperts()),
}
_DECODER = {**_EMBEDDINGS, **_ATTENTION, **_NORMS, **_GATED_MLP}


def _biases(metadata: Metadata) -> dict[str, Any]:
    return {
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": metadata.has_tensor("blk.0.ffn_gate.bias"),
    }


def _granite(metadata: Metadata) -> dict[str, Any]:
    return _biases(metadata) | {
        "embedding_multiplier": metadata.number("embedding_scale", default=1.0),
        "residual_multiplier": metadata.number("residual_scale", default=1.0),
        "attention_multiplier": metadata.number("attention.scale"),
        "logits_scaling": metadata.number("logit_scale", default=1.0),
    }


def _command_r(metadata: Metadata) -> dict[str, Any]:
    return _biases(metadata) | {
        "logit_scale": metadata.number("logit_scale"),
        "use_qk_norm": metadata.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _olmo2(metadata: Metadata) -> dict[str, Any]:
    if metadata.get("attention.sliding_window"):
        fail(metadata.file, "OLMo 3, which has sliding windows, is not read from GGUF files")
    return _biases(metadata)


def _phi3(metadata: Metadata) -> dict[str, Any]:
    settings: dict[str, Any] = {"sliding_window": metadata.get("attention.sliding_window") or None}
    if metadata.has_tensor(LONG_FACTORS):
        scaling: dict[str, Any] = {
            "rope_type": "longrope",
            "long_factor": metadata.floats(LONG_FACTORS),
            "short_factor": metadata.floats(SHORT_FACTORS),
        }
        if metadata.get("rope.scaling.attn_factor") is not None:
            scaling["attention_factor"] = metadata.number("rope.scaling.attn_factor")
        settings["rope_scaling"] = scaling
        settings["original_max_position_embeddings"] = metadata.integer(
            "rope.scaling.original_context_length"
        )
    return settings


def _starcoder2(metadata: Metadata) -> dict[str, Any]:
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": metadata.has_tensor("blk.0.attn_q.bias"),
    }


def _num_experts(metadata: Metadata) -> dict[str, Any]:
    gate = find_tensor(metadata.file, "blk.0.ffn_gate_exps.weight", num_dims=3)
    return {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer(
            "expert_feed_forward_length", default=gate.shape[1]
        ),
    }


def _mixtral(metadata: Metadata) -> dict[str, Any]:
    experts = _num_experts(metadata)
    return {
        "num_local_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "intermediate_size": experts["moe_intermediate_size"],
    }


def _qwen2moe(metadata: Metadata) -> dict[str, Any]:
    shared = find_tensor(metadata.file, "blk.0.ffn_gate_shexp.weight", num_dims=2)
    return _num_experts(metadata) | {
        "norm_topk_prob": bool(metadata.get("expert_weights_norm") or False),
        "shared_expert_intermediate_size": metadata.integer(
            "expert_shared_feed_forward_length", default=shared.shape[0]
        ),
    }


def _qwen3moe(metadata: Metadata) -> dict[str, Any]:
    norm = metadata.get("expert_weights_norm")
    return _num_experts(metadata) | _biases(metadata) | {"norm_topk_prob": norm in (None, True)}


_MIXTRAL = Architecture(
    "Mixtral", "MixtralForCausalLM", "mixtral",
    {**_EMBEDDINGS, **_ATTENTION, **_PERMUTED, **_NORMS, **_EXPERTS},
    _mixtral, mlp="experts",
)  # fmt: skip

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "Llama, Mistral, Mixtral", "LlamaForCausalLM", "llama", {**_DECODER, **_PERMUTED}, _biases
    ),
    "qwen2": Architecture("Qwen 2", "Qwen2ForCausalLM", "qwen2", _DECODER),
    "qwen3": Architecture(
        "Qwen 3", "Qwen3ForCausalLM", "qwen3", {**_DECODER, **_HEAD_NORMS}, _biases
    ),
    "qwen2moe": Architecture(
        "Qwen 2 with experts", "Qwen2MoeForCausalLM", "qwen2_moe",
        {
            **_EMBEDDINGS, **_ATTENTION, **_NORMS, **_EXPERTS,
            "blk.{n}.ffn_gate_inp_shexp": Rule(_LAYER + "mlp.shared_expert_gate", AsRow()),
            "blk.{n}.ffn_gate_shexp": Rule(_LAYER + "mlp.shared_expert.gate_proj"),
            "blk.{n}.ffn_up_shexp": Rule(_LAYER + "mlp.shared_expert.up_proj"),
            "blk.{n}.ffn_down_shexp": Rule(_LAYER + "mlp.shared_expert.down_proj"),
        },
        _qwen2moe, mlp="experts",
    ),
    "qwen3moe": Architecture(
        "Qwen 3 with experts", "Qwen3MoeForCausalLM", "qwen3_moe",
        {**_EMBEDDINGS, **_ATTENTION, **_HEAD_NORMS, **_NORMS, **_EXPERTS},
        _qwen3moe, mlp="experts",
    ),
    "phi3": Architecture(
        "Phi-3 and Phi-4", "Phi3ForCausalLM", "phi3",
        {
            **_EMBEDDINGS, **_ATTENTION, **_NORMS, **_FUSED_MLP,
            "blk.{n}.attn_qkv": Rule(_LAYER + "self_attn.qkv_proj"),
        },
        _phi3, mlp="fused", tables=(LONG_FACTORS, SHORT_FACTORS), partly_rotated=True,
    ),
    "olmo2": Architecture(
        "OLMo 2", "Olmo2ForCausalLM", "olmo2",
        {
            **_EMBEDDINGS, **_ATTENTION, **_HEAD_NORMS, **_GATED_MLP,
            "blk.{n}.post_attention_norm": Rule(_LAYER + "post_attention_layernorm"),
            "blk.{n}.post_ffw_norm": Rule(_LAYER + "post_feedforward_layernorm"),
        },
        _olmo2,
    ),
    "granite": Architecture(
        "Granite 3", "GraniteForCausalLM", "granite", {**_DECODER, **_PERMUTED}, _granite
    ),
    "glm4": Architecture(
        "GLM-4-0414", "Glm4ForCausalLM", "glm4",
        {
            **_EMBEDDINGS, **_ATTENTION, **_NORMS, **_FUSED_MLP,
            "blk.{n}.post_attention_norm": Rule(_LAYER + "post_self_attn_layernorm"),
            "blk.{n}.post_ffw_norm": Rule(_LAYER + "post_mlp_layernorm"),
        },
        _biases, mlp="fused", partly_rotated=True,
    ),
    "command-r": Architecture(
        "Command R", "CohereForCausalLM", "cohere",
        {
            **_EMBEDDINGS, **_ATTENTION, **_HEAD_NORMS, **_GATED_MLP,
            "blk.{n}.attn_norm": Rule(_LAYER + "input_layernorm"),
        },
        _command_r, eps_key="layer_norm_eps",
    ),
    "smollm3": Architecture(
        "SmolLM3", "SmolLM3ForCausalLM", "smollm3", {**_DECODER, **_PERMUTED}, _biases
    ),
    "starcoder2": Architecture(
        "StarCoder2", "Starcoder2ForCausalLM", "starcoder2",
        {
            **_EMBEDDINGS, **_ATTENTION, **_NORMS,
            "blk.{n}.ffn_up": Rule(_LAYER + "mlp.c_fc"),
            "blk.{n}.ffn_down": Rule(_LAYER + "mlp.c_proj"),
        },
        _starcoder2, eps_key="norm_epsilon", mlp="plain",
    ),
}  # fmt: skip

# Models that run from safetensors, by the name that their GGUF files have.
NOT_READ = (
    "deepseek2", "exaone4", "falcon-h1", "gemma2", "gemma3", "glm4moe", "gpt-oss", "mamba2",
    "minimax-m2", "qwen3next",
)  # fmt: skip


def architecture_of(file: GGUFFile) -> Architecture:
    """What a file is; ModelError for what is not in ARCHITECTURES."""
    name = file.metadata.get("general.architecture")
    if name in NOT_READ:
        fail(
            file,
            f"the GGUF architecture {name!r} is not supported, but its safetensors may be: use "
            f"those (docs/models.md); GGUF files are read of {', '.join(ARCHITECTURES)}",
        )
    if not isinstance(name, str) or name not in ARCHITECTURES:
        fail(
            file,
            f"the GGUF architecture {name!r} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}",
        )
    if name == "llama" and file.metadata.get("llama.expert_count"):
        return _MIXTRAL
    return ARCHITECTURES[name]
