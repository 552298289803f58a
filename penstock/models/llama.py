"""Llama and models with its architecture: Llama 1 to 3, SmolLM2, TinyLlama, Yi."""

from __future__ import annotations

from penstock.layers.sublayers import GatedMLP
from penstock.models.decoder import DecoderLM


class LlamaForCausalLM(DecoderLM):
    def mlp(self, index: int) -> GatedMLP:
        config = self.config
        bias = bool(config.raw.get("mlp_bias", False))
        return GatedMLP(self.build, config.hidden_size, config.intermediate_size, bias)
