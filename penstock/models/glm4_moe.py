"""GLM-4.5 and later: rotary embedding over half of each head, and experts as in DeepSeek V3."""

from __future__ import annotations

from torch import nn

from penstock.layers.build import Build
from penstock.layers.experts import Experts
from penstock.layers.sublayers import RotaryAttention
from penstock.models.config import DecoderConfig, read_int
from penstock.models.decoder import DecoderLM
from penstock.models.deepseek_v2 import DeepseekV2ForCausalLM
from penstock.models.deepseek_v3 import EXTRA_LAYER, corrected_experts, without_extra_layers


class Glm4MoeForCausalLM(DecoderLM):
    mtp_layout = EXTRA_LAYER
    weights = DeepseekV2ForCausalLM.weights
    defaults = {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "partial_rotary_factor": 0.5,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "n_shared_experts": 1,
    }

    def __init__(self, build: Build, config: DecoderConfig) -> None:
        super().__init__(build, config)
        self.weights = without_extra_layers(self.weights, config)

    def attention(self, index: int) -> RotaryAttention:
        raw = self.config.raw
        return self.rotary_attention(
            index,
            self.attention_bias,
            output_bias=False,
            qk_norm_eps=self.config.rms_norm_eps if raw.get("use_qk_norm") else None,
        )

    def mlp(self, index: int) -> nn.Module:
        if index < read_int(self.config.raw, "first_k_dense_replace", low=0):
            return super().mlp(index)
        return Experts(self.build, corrected_experts(self.config))
