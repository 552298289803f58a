"""SmolLM3: Llama without positions in every fourth layer."""

from __future__ import annotations

from penstock.layers.sublayers import RotaryAttention
from penstock.models.llama import LlamaForCausalLM
from penstock.models.llama4 import layer_has_positions
from penstock.models.qwen2 import qwen_window


class SmolLM3ForCausalLM(LlamaForCausalLM):
    defaults = {
        "max_position_embeddings": 32768,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
    }

    def attention(self, index: int) -> RotaryAttention:
        raw = self.config.raw
        has_positions = layer_has_positions(self.config, index)
        if raw.get("layer_types") is not None:
            window = qwen_window(self.config, index)
        else:
            is_windowed = bool(raw.get("use_sliding_window")) and not has_positions
            window = self.config.sliding_window if is_windowed else None
        return self.rotary_attention(
            index, self.attention_bias, window=window, has_positions=has_positions
        )
