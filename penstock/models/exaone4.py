"""EXAONE 4: norms after attention and MLP, and a norm on each head's queries and keys.

Models with sliding windows use no positions in the layers without a window.
"""

from __future__ import annotations

from penstock.layers.sublayers import RotaryAttention
from penstock.models.decoder import DecoderLM
from penstock.models.gemma2 import layer_is_windowed
from penstock.models.olmo2 import Olmo2Layer


class Exaone4ForCausalLM(DecoderLM):
    defaults = {"rms_norm_eps": 1e-5}

    def layer(self, index: int) -> Olmo2Layer:
        return Olmo2Layer(self.attention(index), self.mlp(index), [self.norm(), self.norm()])

    def attention(self, index: int) -> RotaryAttention:
        window = self.config.sliding_window
        is_windowed = window is not None and layer_is_windowed(
            self.config, index, 4, "sliding_window_pattern"
        )
        return self.rotary_attention(
            index,
            qk_norm_eps=self.config.rms_norm_eps,
            window=window if is_windowed else None,
            has_positions=window is None or is_windowed,
        )
