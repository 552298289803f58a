"""MiniMax-M2: norms over all query and all key heads at once, and experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from penstock.layers.build import Build
from penstock.layers.sublayers import RotaryAttention
from penstock.models.config import DecoderConfig, read_int
from penstock.models.decoder import DecoderLM
from penstock.models.deepseek_v3 import without_extra_layers
from penstock.models.experts import make_experts
from penstock.models.mixtral import MixtralForCausalLM
from penstock.models.olmo2 import use_all_heads_norms


class MiniMaxM2ForCausalLM(DecoderLM):
    weights = MixtralForCausalLM.weights.renaming(
        {
            r"\.mlp\.e_score_correction_bias$": ".mlp.gate.e_score_correction_bias",
        }
    )
    defaults = {"head_dim": 128, "max_position_embeddings": 196608, "rope_theta": 5000000.0}

    def __init__(self, build: Build, config: DecoderConfig) -> None:
        if config.raw.get("rotary_dim") is not None:  # in published files, instead of a factor
            factor = min(read_int(config.raw, "rotary_dim") / config.head_dim, 1.0)
            config = replace(config, raw={**config.raw, "partial_rotary_factor": factor})
        super().__init__(build, config)
        self.weights = without_extra_layers(self.weights, config)

    def attention(self, index: int) -> RotaryAttention:
        config = self.config
        attention = self.rotary_attention(index)
        if config.raw.get("use_qk_norm", True):
            use_all_heads_norms(attention, self.build, config)
        return attention

    def mlp(self, index: int) -> nn.Module:
        config = self.config
        return make_experts(
            self.build,
            config,
            config.intermediate_size,
            renormalize=True,
            scoring="sigmoid",
            router_float32=True,
            correction=bool(config.raw.get("use_routing_bias", True)),
        )
