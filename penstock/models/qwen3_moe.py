"""Qwen 3 MoE: Qwen 3's attention, and experts in most layers."""

from __future__ import annotations

from torch import nn

from penstock.layers.sublayers import RotaryAttention
from penstock.models.decoder import DecoderLM
from penstock.models.experts import is_sparse, make_qwen_experts


class Qwen3MoeForCausalLM(DecoderLM):
    def attention(self, index: int) -> RotaryAttention:
        raw = self.config.raw
        return self.rotary_attention(
            index,
            self.attention_bias,
            qk_norm_eps=self.config.rms_norm_eps,
            window=self.config.sliding_window if raw.get("use_sliding_window") else None,
        )

    def mlp(self, index: int) -> nn.Module:
        config = self.config
        if not is_sparse(config, index):
            return super().mlp(index)
        return make_qwen_experts(self.build, config, renormalize=False, is_shared=False)
