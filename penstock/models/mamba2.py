"""Mamba-2: only recurrent layers, no positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from penstock.layers.mamba2 import Mamba2, Mamba2Config
from penstock.layers.norm import Norm
from penstock.layers.sublayers import Angles, Stream
from penstock.models.base import WeightTable
from penstock.models.config import DecoderConfig, read_float, read_int
from penstock.models.decoder import DecoderLM
from penstock.protocol.errors import ModelError


class Mamba2Layer(nn.Module):
    """x + mixer(norm(x)). The next layer does the addition."""

    def __init__(self, mixer: Mamba2, norm: Norm) -> None:
        super().__init__()
        self.norm = norm
        self.mixer = mixer

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, angles: Angles) -> Stream:
        x, residual = self.norm.add(x, residual)
        return self.mixer(x), residual


class Mamba2ForCausalLM(DecoderLM):
    weights = WeightTable(
        renamed={
            r"^backbone\.embeddings?\.": "model.embed_tokens.",
            r"^backbone\.norm_f\.": "model.norm.",
            r"^backbone\.": "model.",
        }
    )

    @classmethod
    def settings(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Map Mamba's setting names to those of other decoders."""
        inner = read_int(raw, "expand", 2) * read_int(raw, "hidden_size")
        heads, head_dim = read_int(raw, "num_heads", 128), read_int(raw, "head_dim", 64)
        if inner != heads * head_dim:
            raise ModelError(
                f"config.json: num_heads ({heads}) times head_dim ({head_dim}) must be expand "
                f"times hidden_size ({inner})"
            )
        return {
            **raw,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": head_dim,
            "intermediate_size": inner,
            "rms_norm_eps": read_float(raw, "layer_norm_epsilon", 1e-5),
            "partial_rotary_factor": 0.0,  # no rotary embedding
        }

    def layer(self, index: int) -> Mamba2Layer:
        config, raw = self.config, self.config.raw
        bias = bool(raw.get("use_bias", False))
        groups = read_num_groups(config, "n_groups", 8, config.num_heads)
        mixer = Mamba2Config(
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            state_size=read_int(raw, "state_size", 128),
            num_groups=groups,
            conv_width=read_int(raw, "conv_kernel", 4, low=2),
            conv_bias=bool(raw.get("use_conv_bias", True)),
            input_bias=bias,
            output_bias=bias,
            dt_limit=read_dt_limit(raw),
            norm_eps=config.rms_norm_eps,
            norm_groups=groups,
        )
        return Mamba2Layer(Mamba2(self.build, f"model.layers.{index}", mixer), self.norm())


def read_num_groups(config: DecoderConfig, name: str, default: int, num_heads: int) -> int:
    """The number of head groups of a config.json's Mamba layers."""
    groups = read_int(config.raw, name, default)
    if num_heads % groups:
        raise ModelError(
            f"config.json: {name} ({groups}) must divide the number of Mamba heads ({num_heads})"
        )
    return groups


def read_dt_limit(raw: Mapping[str, Any]) -> tuple[float, float]:
    """The minimum and maximum time step. JSON has no number for infinity."""
    limit = raw.get("time_step_limit")
    if limit is None:
        return 0.0, float("inf")
    try:
        low, high = (float(x["__float__"] if isinstance(x, Mapping) else x) for x in limit)
    except (TypeError, ValueError, KeyError, OverflowError):
        low, high = 1.0, 0.0
    if not 0 <= low <= high:
        raise ModelError(
            f"config.json: time_step_limit must be two numbers from 0 on, the lesser first, "
            f"got {limit!r:.80}"
        )
    return low, high
