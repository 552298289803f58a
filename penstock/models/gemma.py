"""Gemma 1: Llama with Gemma's embeddings, norms and MLP."""

from __future__ import annotations

from torch import nn

from penstock.models.decoder import DecoderLM
from penstock.models.gemma2 import Gemma2ForCausalLM


class GemmaForCausalLM(Gemma2ForCausalLM):
    defaults = {"head_dim": 256, "tie_word_embeddings": True, "max_position_embeddings": 8192}

    def layer(self, index: int) -> nn.Module:
        return DecoderLM.layer(self, index)

    def is_windowed(self, index: int) -> bool:
        return False
