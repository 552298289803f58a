"""Qwen 2 and 2.5: biases on queries, keys and values; a sliding window in late layers if used."""

from __future__ import annotations

from penstock.layers.blocks import RotaryAttention
from penstock.models.config import DecoderConfig, read_int
from penstock.models.decoder import DecoderLM
from penstock.protocol.errors import ModelError


def qwen_window(config: DecoderConfig, index: int) -> int | None:
    """The sliding window of layer `index`; the first `max_window_layers` layers have none."""
    raw = config.raw
    if not raw.get("use_sliding_window") or not raw.get("sliding_window"):
        return None
    layer_types = raw.get("layer_types")
    if layer_types is None:
        windowed = index >= read_int(raw, "max_window_layers", config.num_layers, low=0)
    elif isinstance(layer_types, list) and len(layer_types) == config.num_layers:
        windowed = layer_types[index] == "sliding_attention"
    else:
        raise ModelError(
            f"config.json: layer_types must name the type of each of {config.num_layers} layers, "
            f"got {layer_types!r:.80}"
        )
    return config.sliding_window if windowed else None


class Qwen2ForCausalLM(DecoderLM):
    def attention(self, index: int) -> RotaryAttention:
        return self.rotary_attention(index, qkv_bias=True, window=qwen_window(self.config, index))
