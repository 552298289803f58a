"""GLM-4 (0414): sandwich norms, and interleaved rotary embedding over half of each head."""

from __future__ import annotations

from torch import nn

from penstock.layers.sublayers import RotaryAttention
from penstock.models.decoder import DecoderLM


class Glm4ForCausalLM(DecoderLM):
    weights = DecoderLM.weights.renaming(
        {  # order matters
            r"\.post_attention_layernorm\.": ".pre_feedforward_layernorm.",
            r"\.post_self_attn_layernorm\.": ".post_attention_layernorm.",
            r"\.post_mlp_layernorm\.": ".post_feedforward_layernorm.",
        }
    )
    defaults = {
        "rms_norm_eps": 1.5625e-7,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "partial_rotary_factor": 0.5,
    }
    interleaved_rotary = True

    def layer(self, index: int) -> nn.Module:
        return self.sandwich_layer(index)

    def attention(self, index: int) -> RotaryAttention:
        # The output projection has no bias, whatever attention_bias says.
        return self.rotary_attention(
            index, bool(self.config.raw.get("attention_bias", True)), output_bias=False
        )
