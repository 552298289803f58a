"""The Mamba-2 layer: projection, convolution, state space, gated norm, output projection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from penstock.layers.build import Build
from penstock.layers.linear import Linear, Part, row_linear
from penstock.layers.loadable import copy_shard
from penstock.layers.norm import RMSNorm
from penstock.layers.recurrent import CausalConv, HeadParameters, RecurrentLayer, check_heads
from penstock.ops.blocks import Weight
from penstock.ops.mamba2 import SpaceWeights
from penstock.ops.recurrent import StateStep
from penstock.protocol.errors import ConfigError


@dataclass(frozen=True)
class Mamba2Config:
    """An architecture's settings of its Mamba-2 layers."""

    hidden_size: int
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int  # equal head groups, which share b and c
    conv_width: int
    conv_bias: bool = True
    input_bias: bool = False
    output_bias: bool = False
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    norm_eps: float | None = 1e-5  # None: the output is gated, not normed
    norm_groups: int = 1  # equal parts of a token's output, normed separately
    norm_before_gate: bool = False
    multipliers: Sequence[float] | None = None  # of gate, x, b, c and dt


class Mamba2(RecurrentLayer):
    """Heads are split over ranks. If there are more ranks than head groups, ranks share them."""

    def __init__(self, build: Build, name: str, config: Mamba2Config) -> None:
        ranks, inner = build.tp.size, config.num_heads * config.head_dim
        check_heads(ranks, "Mamba", config.num_heads)
        if config.num_groups % ranks and ranks % config.num_groups:
            raise ConfigError(
                f"tensor_parallel_size must divide the model's {config.num_groups} Mamba groups, "
                f"or be a multiple of them, got {ranks}"
            )
        group_shards = min(ranks, config.num_groups)
        of_groups = config.num_groups * config.state_size
        heads, groups = config.num_heads // ranks, config.num_groups // group_shards
        sections = [
            Part("x_proj", inner, ranks),
            Part("b_proj", of_groups, group_shards),
            Part("c_proj", of_groups, group_shards),
        ]
        conv = CausalConv(build, sections, config.conv_width, config.conv_bias)
        memory = (heads, config.head_dim, config.state_size)
        super().__init__(build, name, memory, conv, gates=((heads, build.dtype),))
        self.config = config
        self.num_groups = groups
        self.in_proj = Linear(
            build,
            config.hidden_size,
            [
                Part("gate_proj", inner, ranks),
                *sections,
                Part("dt_proj", config.num_heads, ranks),
            ],
            config.input_bias,
        )
        self.sizes = [inner // ranks, conv.channels, heads]
        self.scales: torch.Tensor | None = None
        if config.multipliers is not None:
            rows = torch.tensor(list(self.in_proj.part_rows.values()))
            factors = torch.tensor(config.multipliers, dtype=torch.float32)
            self.scales = factors.repeat_interleave(rows).to(build.dtype).to(build.device)
        self.heads = HeadParameters(build, config.num_heads, ("A_log", "D", "dt_bias"))
        self.norm: GatedNorm | None = None
        if config.norm_eps is not None:
            self.norm = GatedNorm(build, config, inner)
        self.out_proj = row_linear(build, inner, config.hidden_size, config.output_bias)
        self._weights: SpaceWeights | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> the same shape."""
        projected = self.in_proj(x)
        if self.scales is not None:
            projected = projected * self.scales
        gate, mixed, dt = projected.split(self.sizes, dim=-1)
        y = self.recur(mixed, dt)
        y = y * F.silu(gate.float()) if self.norm is None else self.norm.gated(y, gate)
        return self.out_proj(y.to(projected.dtype))

    def _recur(
        self,
        inputs: tuple[torch.Tensor, ...],
        memory: torch.Tensor,
        tokens: torch.Tensor,
        step: StateStep,
    ) -> torch.Tensor:
        """[n, inner] float32."""
        mixed, dt = inputs
        inner, of_groups = self.sizes[0], self.num_groups * self.config.state_size
        mixed = self.conv1d(mixed, tokens, step)
        heads, b, c = mixed.split([inner, of_groups, of_groups], dim=-1)
        y: torch.Tensor = self.build.ops.mamba2_scan(
            heads.unflatten(-1, (-1, self.config.head_dim)),
            dt,
            b.unflatten(-1, (self.num_groups, -1)),
            c.unflatten(-1, (self.num_groups, -1)),
            self.weights(),
            memory,
            step,
        )
        return y.flatten(1)

    def weights(self) -> SpaceWeights:
        """The weights of the scan, made at the first step after loading."""
        if self._weights is None:
            heads = self.heads
            self._weights = SpaceWeights(
                a=-heads.get_parameter("A_log").exp(),
                d=heads.get_parameter("D"),
                dt_bias=heads.get_parameter("dt_bias"),
                dt_limit=self.config.dt_limit,
            )
        return self._weights

    def expected(self) -> dict[tuple[str, str], tuple[int, ...]]:
        return self.heads.shapes()

    def load(self, parameter: str, part: str, tensor: Weight) -> None:
        self.heads.take(parameter, tensor)
        self._weights = None


class GatedNorm(RMSNorm):
    """norm(y * silu(gate)), or norm(y) * silu(gate), separately for each norm group."""

    def __init__(self, build: Build, config: Mamba2Config, size: int) -> None:
        assert config.norm_eps is not None
        ranks, groups = build.tp.size, config.norm_groups
        if groups % ranks and ranks % groups:
            raise ConfigError(
                f"tensor_parallel_size must divide the {groups} groups of the model's Mamba norm, "
                f"or be a multiple of them, got {ranks}"
            )
        super().__init__(build, size // ranks, config.norm_eps)
        self.tp = build.tp
        self.full_size = size
        self.num_groups = max(groups // ranks, 1)
        self.ranks_per_group = max(ranks // groups, 1)
        self.before_gate = config.norm_before_gate

    def gated(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """y [n, size] float32 -> the same."""
        gate = F.silu(gate.float())
        return self._norm(y) * gate if self.before_gate else self._norm(y * gate)

    def _norm(self, y: torch.Tensor) -> torch.Tensor:
        grouped = y.view(len(y), self.num_groups, -1)
        square = grouped.pow(2).mean(-1, keepdim=True)
        if self.ranks_per_group > 1:
            squares = square.new_zeros(len(y), self.tp.size // self.ranks_per_group, 1)
            group = self.tp.rank // self.ranks_per_group
            squares[:, group] = square[:, 0] / self.ranks_per_group
            square = self.tp.all_reduce(squares)[:, group : group + 1]
        normed = (grouped * torch.rsqrt(square + self.eps)).flatten(1)
        return normed * self.weight.float()

    def expected(self) -> dict[tuple[str, str], tuple[int, ...]]:
        return {("weight", ""): (self.full_size,)}

    def load(self, parameter: str, part: str, tensor: Weight) -> None:
        copy_shard(self.weight, tensor, self.tp)
