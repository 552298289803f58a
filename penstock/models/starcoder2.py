"""StarCoder2: layer norms, an ungated MLP, biases, and a sliding window in all layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from penstock.layers.build import Build
from penstock.layers.linear import column_linear, row_linear
from penstock.layers.norm import LayerNorm
from penstock.layers.sublayers import RotaryAttention
from penstock.models.decoder import DecoderLM


class PlainMLP(nn.Module):
    """project(gelu(expand(x)))."""

    def __init__(
        self, build: Build, hidden_size: int, intermediate_size: int, bias: bool, is_exact: bool
    ) -> None:
        super().__init__()
        self.approximate = "none" if is_exact else "tanh"
        self.c_fc = column_linear(build, hidden_size, {"": intermediate_size}, bias)
        self.c_proj = row_linear(build, intermediate_size, hidden_size, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate=self.approximate))


class Starcoder2ForCausalLM(DecoderLM):
    defaults = {
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    }
    activations = ("gelu_pytorch_tanh", "gelu")

    @property
    def has_bias(self) -> bool:
        return bool(self.config.raw.get("use_bias", True))

    def norm(self) -> LayerNorm:
        config = self.config
        return LayerNorm(self.build, config.hidden_size, config.rms_norm_eps, bias=True)

    def attention(self, index: int) -> RotaryAttention:
        return self.rotary_attention(index, self.has_bias, window=self.config.sliding_window)

    def mlp(self, index: int) -> PlainMLP:
        config = self.config
        is_exact = config.raw.get("hidden_act") == "gelu"
        return PlainMLP(
            self.build, config.hidden_size, config.intermediate_size, self.has_bias, is_exact
        )
