"""Qwen 2 and 2.5: biases on queries, keys and values; a sliding window in late layers if used."""

from __future__ import annotations

from penstock.layers.sublayers import RotaryAttention
from penstock.models.config import DecoderConfig, layer_kind, read_int
from penstock.models.decoder import DecoderLM
from penstock.models.gemma2 import FULL, WINDOWED


def qwen_window(config: DecoderConfig, index: int) -> int | None:
    """The sliding window of layer `index`; the first `max_window_layers` layers have none."""
    raw = config.raw
    if not raw.get("use_sliding_window") or not raw.get("sliding_window"):
        return None
    kind = layer_kind(config, index, WINDOWED, FULL)
    if kind is None:
        is_windowed = index >= read_int(raw, "max_window_layers", config.num_layers, low=0)
    else:
        is_windowed = kind == WINDOWED
    return config.sliding_window if is_windowed else None


class Qwen2ForCausalLM(DecoderLM):
    def attention(self, index: int) -> RotaryAttention:
        window = qwen_window(self.config, index)
        return self.rotary_attention(index, True, output_bias=False, window=window)
