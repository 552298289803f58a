"""Qwen 3 (dense): a norm on each head's queries and keys in place of Qwen 2's biases."""

from __future__ import annotations

from penstock.layers.sublayers import RotaryAttention
from penstock.models.decoder import DecoderLM
from penstock.models.qwen2 import qwen_window


class Qwen3ForCausalLM(DecoderLM):
    def attention(self, index: int) -> RotaryAttention:
        return self.rotary_attention(
            index,
            self.attention_bias,
            qk_norm_eps=self.config.rms_norm_eps,
            window=qwen_window(self.config, index),
        )
