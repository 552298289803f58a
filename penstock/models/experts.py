"""Builds MoE layers from the common config.json settings."""

from __future__ import annotations

from typing import Any, Literal

from penstock.layers.build import Build
from penstock.layers.experts import Experts, ExpertsConfig
from penstock.models.config import DecoderConfig, read_int
from penstock.ops.experts import Routing
from penstock.protocol.errors import ModelError


def make_experts(
    build: Build,
    config: DecoderConfig,
    intermediate_size: int,  # of one expert
    renormalize: bool = False,
    scoring: Literal["softmax", "sigmoid"] = "softmax",
    **options: Any,
) -> Experts:
    """The experts of a layer. `options` are further settings of `ExpertsConfig`."""
    raw = config.raw
    name = "num_experts" if raw.get("num_experts") is not None else "num_local_experts"
    num_experts, top_k = read_int(raw, name), read_int(raw, "num_experts_per_tok")
    if top_k > num_experts:
        raise ModelError(
            f"config.json: num_experts_per_tok ({top_k}) must be at most {name} ({num_experts})"
        )
    experts = ExpertsConfig(
        num_experts=num_experts,
        hidden_size=config.hidden_size,
        intermediate_size=intermediate_size,
        routing=Routing(top_k, scoring=scoring, renormalize=renormalize),
        **options,
    )
    return Experts(build, experts)


def make_qwen_experts(
    build: Build, config: DecoderConfig, renormalize: bool, is_shared: bool
) -> Experts:
    """Qwen's experts. `is_shared` adds a gated expert that all tokens share."""
    raw = config.raw
    size = read_int(raw, "moe_intermediate_size")
    renormalize = bool(raw.get("norm_topk_prob", renormalize))
    shared_size = read_int(raw, "shared_expert_intermediate_size") if is_shared else 0
    return make_experts(
        build, config, size, renormalize, shared_size=shared_size, shared_gate=is_shared
    )


def is_sparse(config: DecoderConfig, index: int) -> bool:
    """Whether layer `index` of a Qwen model has experts; other layers have an MLP."""
    dense = config.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise ModelError(f"config.json: mlp_only_layers must list layers, got {dense!r:.80}")
    step = read_int(config.raw, "decoder_sparse_step", 1)
    return index not in dense and (index + 1) % step == 0
