"""Falcon-H1: attention and Mamba-2 in parallel in every layer, and multipliers everywhere."""

from __future__ import annotations

import torch

from penstock.layers.build import Build
from penstock.layers.mamba2 import Mamba2, Mamba2Config
from penstock.layers.norm import Norm
from penstock.layers.sublayers import Angles, GatedMLP, RotaryAttention, Stream
from penstock.models.base import Hidden
from penstock.models.config import DecoderConfig, read_float, read_int
from penstock.models.decoder import DecoderLayer, DecoderLM
from penstock.models.mamba2 import read_dt_limit, read_num_groups
from penstock.protocol.errors import ModelError


class FalconH1MLP(GatedMLP):
    """A gated MLP with multipliers of the gate, before its activation, and of the output."""

    def __init__(
        self, build: Build, config: DecoderConfig, gate_multiplier: float, multiplier: float
    ) -> None:
        bias = bool(config.raw.get("mlp_bias", False))
        super().__init__(build, config.hidden_size, config.intermediate_size, bias)
        self.gate_multiplier = gate_multiplier
        self.multiplier = multiplier

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up_proj(x)
        gate_up[:, : gate_up.shape[1] // 2] *= self.gate_multiplier
        return self.down_proj(self.ops.silu_mul(gate_up)) * self.multiplier


class FalconH1Layer(DecoderLayer):
    """x + mamba(norm(x)) + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        mamba: Mamba2,
        attention: RotaryAttention,
        mlp: FalconH1MLP,
        input_norm: Norm,
        mlp_norm: Norm,
        config: DecoderConfig,
    ) -> None:
        super().__init__(attention, mlp, input_norm, mlp_norm)
        self.mamba = mamba
        raw = config.raw
        self.mamba_in = read_float(raw, "ssm_in_multiplier", 1.0)
        self.mamba_out = read_float(raw, "ssm_out_multiplier", 1.0)
        self.attention_in = read_float(raw, "attention_in_multiplier", 1.0)
        self.attention_out = read_float(raw, "attention_out_multiplier", 1.0)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, angles: Angles) -> Stream:
        x, residual = self.input_layernorm.add(x, residual)
        mixed = self.mamba(x * self.mamba_in) * self.mamba_out
        attended = self.self_attn(x * self.attention_in, angles) * self.attention_out
        x, residual = self.post_attention_layernorm.add(mixed + attended, residual)
        return self.mlp(x), residual


class FalconH1ForCausalLM(DecoderLM):
    weights = DecoderLM.weights.renaming(
        {
            r"^model\.final_layernorm\.": "model.norm.",
            r"\.pre_ff_layernorm\.": ".post_attention_layernorm.",
            r"\.feed_forward\.": ".mlp.",
        }
    )
    defaults = {"rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "num_key_value_heads": 8}
    nullable = ("num_key_value_heads",)  # null: as many as query heads

    def __init__(self, build: Build, config: DecoderConfig) -> None:
        super().__init__(build, config)
        self.embedding_multiplier = read_float(config.raw, "embedding_multiplier", 1.0)
        self.logits_multiplier = read_float(config.raw, "lm_head_multiplier", 1.0)

    def layer(self, index: int) -> FalconH1Layer:
        return FalconH1Layer(
            Mamba2(self.build, f"model.layers.{index}.mamba", self._mamba()),
            self.attention(index),
            FalconH1MLP(self.build, self.config, *self._multipliers("mlp_multipliers", 2)),
            self.norm(),
            self.norm(),
            self.config,
        )

    def attention(self, index: int) -> RotaryAttention:
        config = self.config
        # The multiplier of the keys scales their products with queries, so it goes into the scale.
        scale = config.head_dim**-0.5 * read_float(config.raw, "key_multiplier", 1.0)
        return self.rotary_attention(index, self.attention_bias, scale=scale)

    def _mamba(self) -> Mamba2Config:
        config, raw = self.config, self.config.raw
        expanded = read_int(raw, "mamba_expand", 2) * config.hidden_size
        inner = read_int(raw, "mamba_d_ssm", expanded)
        heads = read_int(raw, "mamba_n_heads", 128)
        if inner % heads:
            raise ModelError(
                f"config.json: mamba_n_heads ({heads}) must divide the size of the Mamba layers "
                f"({inner})"
            )
        groups = read_num_groups(config, "mamba_n_groups", 1, heads)
        return Mamba2Config(
            hidden_size=config.hidden_size,
            num_heads=heads,
            head_dim=inner // heads,
            state_size=read_int(raw, "mamba_d_state", 256),
            num_groups=groups,
            conv_width=read_int(raw, "mamba_d_conv", 4, low=2),
            conv_bias=bool(raw.get("mamba_conv_bias", True)),
            input_bias=bool(raw.get("mamba_proj_bias", False)),
            output_bias=bool(raw.get("projectors_bias", False)),
            dt_limit=read_dt_limit(raw),
            norm_eps=config.rms_norm_eps if raw.get("mamba_rms_norm", False) else None,
            norm_groups=groups,
            norm_before_gate=bool(raw.get("mamba_norm_before_gate", True)),
            multipliers=self._multipliers("ssm_multipliers", 5),
        )

    def _multipliers(self, name: str, count: int) -> list[float]:
        values = self.config.raw.get(name)
        if values is None:
            return [1.0] * count
        is_list = isinstance(values, list) and len(values) == count
        if not is_list or any(value is None for value in values):
            raise ModelError(f"config.json: {name} must be {count} numbers, got {values!r:.80}")
        return [read_float({name: value}, name, 1.0) for value in values]

    def logits(
        self, hidden: Hidden, rows: torch.Tensor | slice, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        # Scale the hidden states, not the logits: they are smaller.
        return super().logits(
            Hidden(hidden.states[rows] * self.logits_multiplier), slice(None), out
        )
