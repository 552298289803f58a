"""GLM-4.1V and 4.5V: GLM-4 with a tower for images of any size, and M-RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from penstock.layers.build import Build
from penstock.layers.norm import LayerNorm, Norm, RMSNorm
from penstock.layers.sublayers import GatedMLP
from penstock.layers.vision import (
    Arrangement,
    PatchEmbedding,
    Table,
    VisionAttention,
    VisionBlock,
    plain_linear,
    share_of,
)
from penstock.models.config import DecoderConfig, check_fixed, read_float, read_int
from penstock.models.glm4 import Glm4ForCausalLM
from penstock.models.glm4_moe import Glm4MoeForCausalLM
from penstock.models.qwen2_vl import Grids, MRopeModel, QwenTower
from penstock.models.vision import load_tower, vision_settings


class Glm4vMerger(GatedMLP):
    """A linear layer, a norm and a gated MLP."""

    def __init__(self, build: Build, size: int, intermediate_size: int) -> None:
        share_of(build, intermediate_size, "columns")
        super().__init__(build, size, intermediate_size)
        self.proj = plain_linear(build, size, size, bias=False)
        self.post_projection_norm = LayerNorm(build, size, 1e-5, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.gelu(self.post_projection_norm(self.proj(x))))


class Glm4vTower(QwenTower):
    """Learned positions are stretched to each grid. A convolution makes one row of a square."""

    hidden_size_key = "hidden_size"
    kernel_bias = True

    def __init__(self, build: Build, raw: Mapping[str, Any], hidden_size: int) -> None:
        check_fixed(raw, hidden_act="silu")
        super().__init__(build, raw, hidden_size)
        self.side = read_int(raw, "image_size", 336) // read_int(raw, "patch_size", 14)
        table = Table(build, self.side**2, self.size)
        self.embeddings = nn.ModuleDict({"position_embedding": table})
        self.post_conv_layernorm, self.post_layernorm = self.norm(), self.norm()
        square = (self.size, self.merge, self.merge)
        self.downsample = PatchEmbedding(build, hidden_size, square, bias=True)

    def make_merger(self, hidden_size: int) -> nn.Module:
        return Glm4vMerger(self.build, hidden_size, read_int(self.raw, "intermediate_size", 13696))

    def norm(self) -> Norm:
        return RMSNorm(self.build, self.size, read_float(self.raw, "rms_norm_eps", 1e-5))

    def block(self, index: int) -> VisionBlock:
        attention = VisionAttention(
            self.build,
            self.size,
            self.num_heads,
            bias=bool(self.raw.get("attention_bias", False)),
            fused=True,
            output_bias=False,
        )
        width = read_int(self.raw, "out_hidden_size")
        share_of(self.build, width, "columns")
        mlp = GatedMLP(self.build, self.size, width)
        return VisionBlock(attention, mlp, [self.norm(), self.norm()])

    def arranged(self, grids: Grids, arrangement: Arrangement) -> Arrangement:
        positions = self._positions(grids, self.build.device).to(self.build.dtype)
        return replace(arrangement, positions=positions)

    def layers(self, x: torch.Tensor, arrangement: Arrangement) -> torch.Tensor:
        assert arrangement.positions is not None
        x = self.post_conv_layernorm(x) + arrangement.positions
        for block in self.blocks:
            x = block(x, arrangement.segments, arrangement.angles)
        squares = self.post_layernorm(x).unflatten(0, (-1, self.merge**2)).transpose(1, 2)
        return self.merger(self.downsample(squares))

    def _positions(self, grids: Grids, device: torch.device) -> torch.Tensor:
        """The table of learned positions at each patch (bicubic)."""
        table = self.embeddings["position_embedding"].weight
        assert isinstance(table, torch.Tensor)
        picture = table.float().T.reshape(1, self.size, self.side, self.side)
        sizes = [torch.tensor([h, w]).expand(t * h * w, 2) for t, h, w in grids.grids]
        at = (torch.from_numpy(grids.coordinates()) + 0.5) / torch.cat(sizes)
        places = (2 * at - 1).float().flip(1).to(device)  # x, y from -1 to 1
        found = F.grid_sample(
            picture,
            places[None, :, None],
            mode="bicubic",
            align_corners=False,
            padding_mode="border",
        )
        return found[0, :, :, 0].T


class Glm4vModel(MRopeModel):
    """What the dense model and the one with experts share."""

    def __init__(self, build: Build, config: DecoderConfig) -> None:
        super().__init__(build, config)  # type: ignore[call-arg]
        raw = vision_settings(config.raw)
        load_tower(self, build, lambda own: Glm4vTower(own, raw, config.hidden_size))  # type: ignore[arg-type]


class Glm4vForConditionalGeneration(Glm4vModel, Glm4ForCausalLM):
    weights = Glm4ForCausalLM.weights.renaming(Glm4vModel.renamed)


class Glm4vMoeForConditionalGeneration(Glm4vModel, Glm4MoeForCausalLM):
    weights = Glm4MoeForCausalLM.weights.renaming(Glm4vModel.renamed)
