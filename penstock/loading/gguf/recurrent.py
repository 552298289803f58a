"""GGUF architectures: models with recurrent layers."""

from __future__ import annotations

from typing import Any

from penstock.loading.gguf.architecture import GGUFArchitecture, biases
from penstock.loading.gguf.experts import num_experts, shared_expert
from penstock.loading.gguf.metadata import Metadata
from penstock.loading.gguf.rules import (
    EMBEDDINGS,
    EXPERTS,
    GATED,
    GATED_MLP,
    HEAD_NORMS,
    HEADS,
    LAYER,
    NORMS_POST,
    SHARED_EXPERT,
    SHARED_GATE,
    Rule,
    Stored,
    in_layer,
    mamba,
    minus_one,
    whole,
)

ENDLESS = 2**20  # what converters write if a model has no maximum context


def _mamba2(metadata: Metadata) -> dict[str, Any]:
    inner, heads = metadata.integer("ssm.inner_size"), metadata.integer("ssm.time_step_rank")
    hidden, length = metadata.integer("embedding_length"), metadata.integer("context_length")
    return {
        "num_heads": heads,
        "head_dim": inner // heads,
        "expand": inner // hidden,
        "state_size": metadata.integer("ssm.state_size"),
        "n_groups": metadata.integer("ssm.group_count"),
        "conv_kernel": metadata.integer("ssm.conv_kernel"),
        "use_bias": metadata.has_tensor("blk.0.ssm_in.bias"),
        "use_conv_bias": metadata.has_tensor("blk.0.ssm_conv1d.bias"),
        "max_position_embeddings": None if length == ENDLESS else length,
    }


def _falcon_h1(metadata: Metadata) -> dict[str, Any]:
    """The multipliers are already in the weights, so there are no settings for them."""
    heads = metadata.integer("ssm.time_step_rank")
    return biases(metadata) | {
        "mamba_d_ssm": metadata.integer("ssm.inner_size"),
        "mamba_n_heads": heads,
        "mamba_d_head": metadata.integer("ssm.inner_size") // heads,
        "mamba_n_groups": metadata.integer("ssm.group_count"),
        "mamba_d_state": metadata.integer("ssm.state_size"),
        "mamba_d_conv": metadata.integer("ssm.conv_kernel"),
        "mamba_conv_bias": metadata.has_tensor("blk.0.ssm_conv1d.bias"),
        "mamba_proj_bias": metadata.has_tensor("blk.0.ssm_in.bias"),
        "projectors_bias": metadata.has_tensor("blk.0.ssm_out.bias"),
        "mamba_rms_norm": metadata.has_tensor("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def _qwen3next(metadata: Metadata) -> dict[str, Any]:
    heads = metadata.integer("ssm.time_step_rank")
    norm = metadata.get("expert_weights_norm")
    return (
        num_experts(metadata)
        | shared_expert(metadata)
        | {
            "norm_topk_prob": norm in (None, True),
            "full_attention_interval": metadata.integer("full_attention_interval", default=4),
            "linear_num_key_heads": metadata.integer("ssm.group_count"),
            "linear_num_value_heads": heads,
            "linear_key_head_dim": metadata.integer("ssm.state_size"),
            "linear_value_head_dim": metadata.integer("ssm.inner_size") // heads,
            "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
            # Older files store the projection as checkpoints do, newer ones in the order of
            # computation.
            "linear_by_key_head": metadata.has_tensor("blk.0.ssm_in.weight"),
        }
    )


_LINEAR = LAYER + "linear_attn."

RECURRENT: dict[str, GGUFArchitecture] = {
    "mamba2": GGUFArchitecture(
        "Mamba-2", "Mamba2ForCausalLM", "mamba2",
        {
            **EMBEDDINGS,
            **in_layer({"attn_norm": "norm"}),
            **mamba(LAYER + "mixer."),
        },
        _mamba2, eps_key="layer_norm_epsilon", mlp="none", attention="none",
    ),
    "falcon-h1": GGUFArchitecture(
        "Falcon-H1", "FalconH1ForCausalLM", "falcon_h1",
        {
            **HEADS,
            **in_layer({"attn_norm": "input_layernorm"}),
            # Converters omit the suffix of this one.
            "blk.{n}.ffn_norm": whole(LAYER + "pre_ff_layernorm.weight"),
            "blk.{n}.ffn_norm.weight": whole(LAYER + "pre_ff_layernorm.weight"),
            **in_layer(GATED, "feed_forward."),
            **mamba(LAYER + "mamba."),
        },
        _falcon_h1,
    ),
    "qwen3next": GGUFArchitecture(
        "Qwen3-Next", "Qwen3NextForCausalLM", "qwen3_next",
        {
            **HEADS, **minus_one({"output_norm": Rule("model.norm")}), **minus_one(NORMS_POST),
            **minus_one(HEAD_NORMS), **GATED_MLP, **EXPERTS, **SHARED_EXPERT,
            **SHARED_GATE,
            **in_layer(
                {
                    "attn_qkv": "in_proj_qkv",
                    "attn_gate": "in_proj_z",
                    "ssm_in": "in_proj_qkvz",
                    "ssm_ba": "in_proj_ba",
                    "ssm_norm": "norm",
                    "ssm_out": "out_proj",
                },
                "linear_attn.",
            ),
            "blk.{n}.ssm_conv1d.weight": whole(_LINEAR + "conv1d.weight", Stored.SQUEEZED),
            "blk.{n}.ssm_dt.bias": whole(_LINEAR + "dt_bias"),
            "blk.{n}.ssm_a": whole(_LINEAR + "A_log", Stored.MINUS_EXP),
        },
        _qwen3next, mlp="experts", attention="gated", partly_rotated=True,
    ),
}  # fmt: skip
