"""Qwen 2 and 2.5: biases on queries, keys and values; a sliding window in late layers if used."""

from __future__ import annotations

from penstock.layers.blocks import RotaryAttention
from penstock.models.config import DecoderConfig
from penstock.models.decoder import DecoderLM


def qwen_window(config: DecoderConfig, index: int) -> int | None:
    """The sliding window of layer `index`; the first `max_window_layers` layers have none."""
    raw = config.raw
    layer_types = raw.get("layer_types")
    if not raw.get("use_sliding_window") or not raw.get("sliding_window"):
        return None
    if layer_types is not None:
        windowed = layer_types[index] == "sliding_attention"
    else:
        windowed = index >= raw.get("max_window_layers", config.num_layers)
    return int(raw["sliding_window"]) if windowed else None


class Qwen2ForCausalLM(DecoderLM):
    def attention(self, index: int) -> RotaryAttention:
        return self.rotary_attention(index, qkv_bias=True, window=qwen_window(self.config, index))
