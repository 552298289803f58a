"""Qwen3-VL: Qwen3 with the tower of Qwen2-VL, learned positions, and features for early layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from penstock.layers.build import Build
from penstock.layers.context import current_context
from penstock.layers.linear import column_linear, row_linear
from penstock.layers.norm import LayerNorm
from penstock.layers.sublayers import Stream
from penstock.layers.vision import Arrangement, Table, activation, plain_linear, share_of
from penstock.models.config import DecoderConfig, read_int
from penstock.models.experts import split_experts
from penstock.models.qwen2_vl import EPS, Grids, MRopeModel, QwenTower
from penstock.models.qwen3 import Qwen3ForCausalLM
from penstock.models.qwen3_moe import Qwen3MoeForCausalLM
from penstock.models.vision import load_tower, vision_settings
from penstock.ops.blocks import Weight
from penstock.protocol.errors import ConfigError, ModelError


class Qwen3VisionMLP(nn.Module):
    def __init__(self, build: Build, size: int, raw: Mapping[str, Any]) -> None:
        super().__init__()
        intermediate_size = read_int(raw, "intermediate_size")
        self.act = activation(raw.get("hidden_act", "gelu_pytorch_tanh"))
        share_of(build, intermediate_size, "columns")
        self.linear_fc1 = column_linear(build, size, {"": intermediate_size}, bias=True)
        self.linear_fc2 = row_linear(build, intermediate_size, size, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(self.act(self.linear_fc1(x)))


class Qwen3PatchMerger(nn.Module):
    """The patches of a square together through two linear layers, with a norm before or after."""

    def __init__(
        self, build: Build, size: int, merge: int, hidden_size: int, norm_after: bool
    ) -> None:
        super().__init__()
        self.width = size * merge**2
        self.norm_after = norm_after
        self.norm = LayerNorm(build, self.width if norm_after else size, EPS, bias=True)
        self.linear_fc1 = plain_linear(build, self.width, self.width)
        self.linear_fc2 = plain_linear(build, self.width, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x.reshape(-1, self.width)) if self.norm_after else self.norm(x)
        return self.linear_fc2(F.gelu(self.linear_fc1(x.reshape(-1, self.width))))


class Qwen3Tower(QwenTower):
    """Gives a row for each square: its embedding, then what the first layers add to it."""

    hidden_size_key = "hidden_size"
    kernel_bias = True

    def __init__(self, build: Build, raw: Mapping[str, Any], hidden_size: int) -> None:
        super().__init__(build, raw, hidden_size)
        count = read_int(raw, "num_position_embeddings")
        self.side = int(count**0.5)
        self.pos_embed = Table(build, count, self.size)
        self.levels = list(raw["deepstack_visual_indexes"])
        self.deepstack_merger_list = nn.ModuleList(
            Qwen3PatchMerger(build, self.size, self.merge, hidden_size, True) for _ in self.levels
        )

    def make_merger(self, hidden_size: int) -> nn.Module:
        return Qwen3PatchMerger(self.build, self.size, self.merge, hidden_size, False)

    def mlp(self) -> nn.Module:
        return Qwen3VisionMLP(self.build, self.size, self.raw)

    def arranged(self, grids: Grids, arrangement: Arrangement) -> Arrangement:
        positions = self._positions(grids, self.build.device).to(self.build.dtype)
        return replace(arrangement, positions=positions)

    def layers(self, x: torch.Tensor, arrangement: Arrangement) -> torch.Tensor:
        assert arrangement.positions is not None
        x = x + arrangement.positions
        levels: dict[int, torch.Tensor] = {}
        for index, block in enumerate(self.blocks):
            x = block(x, arrangement.segments, arrangement.angles)
            if index in self.levels:
                number = self.levels.index(index)
                levels[number] = self.deepstack_merger_list[number](x)
        return torch.cat([self.merger(x), *(levels[i] for i in range(len(self.levels)))], dim=-1)

    def _positions(self, grids: Grids, device: torch.device) -> torch.Tensor:
        """The square table of learned positions, stretched to each grid (bilinear)."""
        sizes = np.concatenate([np.tile([[h, w]], (t * h * w, 1)) for t, h, w in grids.grids])
        at = grids.coordinates().astype(np.float32)
        at = at * (self.side - 1) / np.maximum(sizes - 1, 1).astype(np.float32)
        low = np.floor(at).astype(np.int64)
        high = np.minimum(low + 1, self.side - 1)
        share = torch.from_numpy(at - low).float().to(device)
        table = self.pos_embed.weight.float()
        total = torch.zeros(len(at), self.size, device=device)
        for rows, row_share in ((low[:, 0], 1 - share[:, 0]), (high[:, 0], share[:, 0])):
            for columns, column_share in ((low[:, 1], 1 - share[:, 1]), (high[:, 1], share[:, 1])):
                index = torch.from_numpy(rows * self.side + columns).to(device)
                total += table[index] * (row_share * column_share)[:, None]
        return total


class Qwen3VLModel(MRopeModel):
    """What the dense model and the one with experts share."""

    def __init__(self, build: Build, config: DecoderConfig) -> None:
        super().__init__(build, config)  # type: ignore[call-arg]
        raw = vision_settings(config.raw)
        indexes = raw.setdefault("deepstack_visual_indexes", [8, 16, 24])
        if not isinstance(indexes, list) or len(indexes) > config.num_layers:
            raise ModelError(
                f"config.json: deepstack_visual_indexes must be a list of at most "
                f"{config.num_layers} layers, got {indexes!r:.80}"
            )
        self.num_levels = 1 + len(indexes)
        load_tower(self, build, lambda own: Qwen3Tower(own, raw, config.hidden_size))  # type: ignore[arg-type]
        if not self.media_width or not build.mesh.is_first_stage:
            return
        if len(self.stage) < len(indexes):  # type: ignore[attr-defined]
            raise ConfigError(
                f"the first {len(indexes)} layers of this model take features of images, so the "
                f"first pipeline stage must have them: pipeline_parallel_size must be at most "
                f"{config.num_layers // len(indexes)}, got {build.mesh.pp.size}; lower it, or set "
                "language_model_only"
            )
        for index in range(len(indexes)):
            layer = self.model.layers[index]  # type: ignore[attr-defined]
            layer.register_forward_hook(partial(_add_level, index + 1))


def _add_level(level: int, layer: nn.Module, inputs: object, output: Stream) -> None:
    """After a layer: add what the tower has for it to the rows of media."""
    media = current_context().media
    if media is not None:
        x = output[0]
        width = x.shape[1]
        x[media.rows] += media.values[:, level * width : (level + 1) * width].to(x.dtype)


class Qwen3VLForConditionalGeneration(Qwen3VLModel, Qwen3ForCausalLM):
    weights = Qwen3ForCausalLM.weights.renaming(Qwen3VLModel.renamed)


class Qwen3VLMoeForConditionalGeneration(Qwen3VLModel, Qwen3MoeForCausalLM):
    weights = Qwen3MoeForCausalLM.weights.renaming(Qwen3VLModel.renamed)
    defaults = {**Qwen3MoeForCausalLM.defaults, "norm_topk_prob": True}

    def convert(self, tensors: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        return split_experts(tensors, "mlp", self.hidden_size)
