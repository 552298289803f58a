"""Qwen 1.5 and 2 MoE: Qwen 2's attention, routed experts and a shared expert."""

from __future__ import annotations

from torch import nn

from penstock.layers.sublayers import RotaryAttention
from penstock.models.decoder import DecoderLM
from penstock.models.experts import is_sparse, make_qwen_experts
from penstock.models.qwen2 import qwen_window


class Qwen2MoeForCausalLM(DecoderLM):
    def attention(self, index: int) -> RotaryAttention:
        bias, window = bool(self.config.raw.get("qkv_bias", True)), qwen_window(self.config, index)
        return self.rotary_attention(index, bias, output_bias=False, window=window)

    def mlp(self, index: int) -> nn.Module:
        config = self.config
        if not is_sparse(config, index):
            return super().mlp(index)
        return make_qwen_experts(self.build, config, renormalize=False, is_shared=True)
