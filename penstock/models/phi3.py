"""Phi-3, Phi-3.5 and Phi-4: Llama with fused projections and partial rotary embedding.

Long-context versions have two sets of frequencies (longrope).
"""

from __future__ import annotations

from penstock.layers.sublayers import RotaryAttention
from penstock.models.decoder import DecoderLM


class Phi3ForCausalLM(DecoderLM):
    defaults = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}

    def attention(self, index: int) -> RotaryAttention:
        return self.rotary_attention(index, window=self.config.sliding_window)
