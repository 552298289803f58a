"""The gated delta net: projections, convolution, delta rule, gated norm, output projection."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from penstock.layers.build import Build
from penstock.layers.linear import Linear, Part, row_linear
from penstock.layers.norm import RMSNorm
from penstock.layers.recurrent import CausalConv, HeadParameters, RecurrentLayer, check_heads
from penstock.layers.sublayers import Angles
from penstock.ops.blocks import Weight
from penstock.ops.recurrent import StateStep


@dataclass(frozen=True)
class DeltaNetConfig:
    hidden_size: int
    num_key_heads: int
    num_value_heads: int  # a multiple of the key heads
    key_dim: int  # of a head
    value_dim: int
    conv_width: int
    norm_eps: float
    by_key_head: bool = True  # layout of the checkpoint's projection; else queries first


class GatedDeltaNet(RecurrentLayer):
    """Checkpoints store projections by key head: its query, key, values and gates together.

    GGUF files store all queries, then all keys, then all values, and the gates in another tensor.
    """

    def __init__(self, build: Build, name: str, config: DeltaNetConfig) -> None:
        ranks = build.tp.size
        check_heads(ranks, "linear key", config.num_key_heads)
        keys = config.num_key_heads * config.key_dim
        values = config.num_value_heads * config.value_dim
        sections = [Part("q", keys, ranks), Part("k", keys, ranks), Part("v", values, ranks)]
        conv = CausalConv(build, sections, config.conv_width, bias=False)
        memory = (config.num_value_heads // ranks, config.key_dim, config.value_dim)
        heads = config.num_value_heads // ranks
        gates = ((heads, torch.float32), (heads, torch.float32))
        super().__init__(build, name, memory, conv, gates)
        self.config = config
        self.shared_by = config.num_value_heads // config.num_key_heads
        self.in_proj_qkvz: Linear | None = None
        self.in_proj_qkv: Linear | None = None
        if config.by_key_head:
            whole = Part("", 2 * keys + 2 * values, ranks)
            self.in_proj_qkvz = Linear(build, config.hidden_size, [whole])
        else:
            self.in_proj_qkv = Linear(build, config.hidden_size, sections)
            self.in_proj_z = Linear(build, config.hidden_size, [Part("", values, ranks)])
        self.in_proj_ba = Linear(
            build, config.hidden_size, [Part("", 2 * config.num_value_heads, ranks)]
        )
        self.in_proj_ba.may_quantize = False  # small, and its outputs become exponents
        self.heads = HeadParameters(build, config.num_value_heads, ("A_log", "dt_bias"))
        self.norm = RMSNorm(build, config.value_dim, config.norm_eps)
        self.out_proj = row_linear(build, values, config.hidden_size)

    def forward(self, x: torch.Tensor, angles: Angles | None = None) -> torch.Tensor:
        """[n, hidden_size] -> the same shape. The `angles` of attention layers are not used."""
        config, shared_by = self.config, self.shared_by
        mixed, gate = self._project(x)
        b, a = self.in_proj_ba(x).unflatten(-1, (-1, 2 * shared_by)).float().chunk(2, dim=-1)
        rate = -self.heads.get_parameter("A_log").exp()
        g = rate * F.softplus(a.flatten(1) + self.heads.get_parameter("dt_bias"))
        y = self.recur(mixed, g, b.flatten(1).sigmoid())
        gate = F.silu(gate.reshape(len(gate), -1, config.value_dim).float())
        normed = self.norm(y.to(x.dtype)).float() * gate
        return self.out_proj(normed.to(x.dtype).flatten(1))

    def _recur(
        self,
        inputs: tuple[torch.Tensor, ...],
        memory: torch.Tensor,
        tokens: torch.Tensor,
        step: StateStep,
    ) -> torch.Tensor:
        """[n, heads, value_dim] float32."""
        mixed, g, beta = inputs
        config = self.config
        mixed = self.conv1d(mixed, tokens, step)
        keys = config.num_key_heads // self.build.tp.size * config.key_dim
        query, key, value = mixed.split([keys, keys, mixed.shape[1] - 2 * keys], dim=-1)
        y: torch.Tensor = self.build.ops.gated_delta_rule(
            query.unflatten(-1, (-1, config.key_dim)),
            key.unflatten(-1, (-1, config.key_dim)),
            value.unflatten(-1, (-1, config.value_dim)),
            g,
            beta,
            memory,
            step,
        )
        return y

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries, keys and values [n, channels] in this order, and gates [n, values]."""
        config = self.config
        if self.in_proj_qkv is not None:
            return self.in_proj_qkv(x), self.in_proj_z(x)
        assert self.in_proj_qkvz is not None
        values = self.shared_by * config.value_dim
        by_key_head = self.in_proj_qkvz(x).unflatten(
            -1, (-1, 2 * config.key_dim + 2 * values)
        )  # [n, key_heads, ...]
        query, key, value, gate = by_key_head.split(
            [config.key_dim, config.key_dim, values, values], dim=-1
        )
        mixed = torch.cat([query.flatten(1), key.flatten(1), value.flatten(1)], dim=-1)
        return mixed, gate.flatten(1)

    def expected(self) -> dict[tuple[str, str], tuple[int, ...]]:
        return self.heads.shapes()

    def load(self, parameter: str, part: str, tensor: Weight) -> None:
        self.heads.take(parameter, tensor)
