"""SmolLM3: Llama with every fourth layer blind to positions."""

from __future__ import annotations

from penstock.layers.blocks import RotaryAttention
from penstock.models.config import read_int
from penstock.models.llama import LlamaForCausalLM
from penstock.models.qwen2 import qwen_window
from penstock.protocol.errors import ModelError


class SmolLM3ForCausalLM(LlamaForCausalLM):
    defaults = {
        "max_position_embeddings": 32768,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
    }

    def attention(self, index: int) -> RotaryAttention:
        raw = self.config.raw
        bias = bool(raw.get("attention_bias", False))
        has_positions = self._has_positions(index)
        if raw.get("layer_types") is not None:
            window = qwen_window(self.config, index)
        else:
            is_windowed = bool(raw.get("use_sliding_window")) and not has_positions
            window = self.config.sliding_window if is_windowed else None
        return self.rotary_attention(
            index, qkv_bias=bias, output_bias=bias, window=window, has_positions=has_positions
        )

    def _has_positions(self, index: int) -> bool:
        given = self.config.raw.get("no_rope_layers")  # 1 where a layer does have them
        if given is None:
            return (index + 1) % read_int(self.config.raw, "no_rope_layer_interval", 4) != 0
        if not isinstance(given, list) or len(given) < self.config.num_layers:
            raise ModelError(
                f"config.json: no_rope_layers must have a 0 or 1 for each of "
                f"{self.config.num_layers} layers, got {given!r:.80}"
            )
        return bool(given[index])
