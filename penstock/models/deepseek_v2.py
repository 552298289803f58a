"""DeepSeek V2: latent attention, and routed and shared experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from penstock.layers.build import Build
from penstock.layers.experts import Experts, ExpertsConfig
from penstock.layers.latent_attention import LatentAttention, LatentConfig
from penstock.layers.rotary import rotary_parameters
from penstock.models.config import DecoderConfig, read_float, read_int
from penstock.models.decoder import DecoderLM
from penstock.ops.experts import Routing
from penstock.protocol.errors import ModelError

GREEDY, GROUPS = "greedy", "group_limited_greedy"


class DeepseekV2ForCausalLM(DecoderLM):
    weights = DecoderLM.weights.renaming({r"\.mlp\.shared_experts\.": ".mlp.shared_expert."})

    def __init__(self, build: Build, config: DecoderConfig) -> None:
        # The rotated part counts as a head, and there are as many keys as queries.
        rope_dim = read_int(config.raw, "qk_rope_head_dim")
        super().__init__(build, replace(config, head_dim=rope_dim, num_kv_heads=config.num_heads))

    def attention(self, index: int) -> LatentAttention:
        config, raw = self.config, self.config.raw
        nope_dim = read_int(raw, "qk_nope_head_dim")
        latent = LatentConfig(
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            q_rank=None if raw.get("q_lora_rank") is None else read_int(raw, "q_lora_rank"),
            kv_rank=read_int(raw, "kv_lora_rank"),
            nope_dim=nope_dim,
            rope_dim=config.head_dim,
            value_dim=read_int(raw, "v_head_dim"),
            scale=(nope_dim + config.head_dim) ** -0.5 * yarn_scale(raw),
            bias=bool(raw.get("attention_bias", False)),
            interleaved=bool(raw.get("rope_interleave", True)),
        )
        return LatentAttention(self.build, f"model.layers.{index}", latent, self.rotary)

    def mlp(self, index: int) -> nn.Module:
        if index < read_int(self.config.raw, "first_k_dense_replace", 0, low=0):
            return super().mlp(index)
        return Experts(self.build, self.experts())

    def experts(self) -> ExpertsConfig:
        """The experts of the layers after the first dense ones."""
        method = self.config.raw.get("topk_method", GREEDY)
        if method not in (GREEDY, GROUPS):
            raise ModelError(
                f"config.json: topk_method must be {GREEDY} or {GROUPS}, got {method!r:.80}"
            )
        experts = routed_experts(self.config)
        routing = replace(experts.routing, group_score="max")
        if method == GREEDY:
            routing = replace(routing, num_groups=1, top_groups=1)
        return replace(experts, routing=routing)


def yarn_scale(raw: Mapping[str, Any]) -> float:
    """The attention scale from YaRN's `mscale_all_dim`."""
    parameters = rotary_parameters(raw)
    over_all = parameters.get("mscale_all_dim")
    factor = parameters.get("factor") or 1.0
    if parameters["rope_type"] == "default" or not over_all or factor <= 1:
        return 1.0
    return float(0.1 * over_all * math.log(factor) + 1.0) ** 2


def routed_experts(config: DecoderConfig) -> ExpertsConfig:
    """The experts' settings under the names of DeepSeek and related models."""
    raw = config.raw
    num_experts, top_k = read_int(raw, "n_routed_experts"), read_int(raw, "num_experts_per_tok")
    num_groups, top_groups = read_int(raw, "n_group", 1), read_int(raw, "topk_group", 1)
    if num_experts % num_groups:
        raise ModelError(
            f"config.json: n_group ({num_groups}) must divide n_routed_experts ({num_experts})"
        )
    eligible = num_experts // num_groups * min(top_groups, num_groups)
    if top_k > eligible:
        raise ModelError(
            f"config.json: num_experts_per_tok ({top_k}) must be at most the {eligible} experts "
            f"of topk_group ({top_groups}) groups"
        )
    size = read_int(raw, "moe_intermediate_size")
    return ExpertsConfig(
        num_experts=num_experts,
        hidden_size=config.hidden_size,
        intermediate_size=size,
        routing=Routing(
            top_k,
            renormalize=bool(raw.get("norm_topk_prob", False)),
            scale=read_float(raw, "routed_scaling_factor", 1.0),
            num_groups=num_groups,
            top_groups=min(top_groups, num_groups),
        ),
        router_float32=True,
        shared_size=size * read_int(raw, "n_shared_experts", 0, low=0),
    )
