"""Mistral: Llama with an optional sliding window over all layers."""

from __future__ import annotations

from penstock.layers.sublayers import RotaryAttention
from penstock.models.decoder import DecoderLM


class MistralForCausalLM(DecoderLM):
    def attention(self, index: int) -> RotaryAttention:
        return self.rotary_attention(index, window=self.config.sliding_window)
