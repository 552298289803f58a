"""The vision transformers CLIP, SigLIP and their like: images of one size, learned positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from penstock.layers.build import Build
from penstock.layers.norm import LayerNorm
from penstock.layers.vision import (
    Arrangement,
    PatchEmbedding,
    Segments,
    Table,
    VisionAttention,
    VisionMLP,
    activation,
)
from penstock.models.config import read_float, read_int
from penstock.models.encoder import EncoderParts, FusableLayer
from penstock.ops.blocks import BlockTensor, Weight
from penstock.protocol.errors import ModelError


class VitLayer(FusableLayer):
    def __init__(self, build: Build, raw: Mapping[str, Any], act: str) -> None:
        super().__init__()
        size, eps = read_int(raw, "hidden_size"), read_float(raw, "layer_norm_eps", 1e-6)
        self.layer_norm1 = LayerNorm(build, size, eps, bias=True)
        self.self_attn = VisionAttention(build, size, read_int(raw, "num_attention_heads"))
        self.layer_norm2 = LayerNorm(build, size, eps, bias=True)
        width = read_int(raw, "intermediate_size")
        self.activation = str(raw.get("hidden_act", act))
        self.mlp = VisionMLP(build, size, width, activation(self.activation))

    def parts(self) -> EncoderParts:
        attention, mlp = self.self_attn, self.mlp
        return EncoderParts(
            (self.layer_norm1, self.layer_norm2),
            (attention.qkv_proj, attention.out_proj, mlp.fc1, mlp.fc2),
            attention.num_heads, attention.head_dim, attention.head_dim**-0.5,
            self.activation.replace("pytorch_", ""),
        )  # fmt: skip

    def forward(self, x: torch.Tensor, segments: Segments) -> torch.Tensor:
        if self.fused is not None and self.fused.applies():
            return self.fused(x, segments.starts, None)
        x = x + self.self_attn(self.layer_norm1(x), segments)
        return x + self.mlp(self.layer_norm2(x))


class VitEmbeddings(nn.Module):
    def __init__(self, build: Build, raw: Mapping[str, Any], is_clip: bool) -> None:
        super().__init__()
        size, patch = read_int(raw, "hidden_size"), read_int(raw, "patch_size")
        self.side = read_int(raw, "image_size") // patch
        kernel = (read_int(raw, "num_channels", 3), patch, patch)
        self.patch_embedding = PatchEmbedding(build, size, kernel, bias=not is_clip)
        self.class_embedding = build.empty(size) if is_clip else None
        self.position_embedding = Table(build, self.side**2 + int(is_clip), size)

    def forward(self, images: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[n, channels, height, width] -> [n, tokens, hidden_size]."""
        patches = self.patch_embedding.patches_of(images)
        n, rows, columns, _ = patches.shape
        x = self.patch_embedding(patches.flatten(0, 2)).unflatten(0, (n, rows * columns))
        if self.class_embedding is not None:
            x = torch.cat([self.class_embedding.expand(n, 1, -1), x], dim=1)
        return x + positions

    def positions(self, height: int, width: int) -> torch.Tensor:
        """The learned positions of an image's tokens, [tokens, hidden_size]."""
        patch = self.patch_embedding.kernel[1]
        rows, columns = height // patch, width // patch
        table = self.position_embedding.weight
        if (rows, columns) == (self.side, self.side):
            return table
        if self.class_embedding is not None:
            raise ValueError(f"an image must have {self.side} x {self.side} patches")
        places = self._places(rows)[:, None] * self.side + self._places(columns)
        return table[places.flatten().to(table.device)]

    def expected(self) -> dict[tuple[str, str], tuple[int, ...]]:
        if self.class_embedding is None:
            return {}
        return {("class_embedding", ""): tuple(self.class_embedding.shape)}

    def load(self, parameter: str, part: str, tensor: Weight) -> None:
        assert self.class_embedding is not None
        assert not isinstance(tensor, BlockTensor), "not a matrix"
        self.class_embedding.copy_(tensor)

    def _places(self, count: int) -> torch.Tensor:
        """Where `count` patches in a row are in the table, spread evenly."""
        if count == self.side:
            return torch.arange(count)
        edges = torch.arange(1 / self.side, 1.0, 1 / self.side)
        shares = (torch.arange(count, dtype=torch.float32) * (1.0 / count)).clamp(max=1.0 - 1e-6)
        return torch.bucketize(shares, edges, right=True)


class Vit(nn.Module):
    """`num_layers`: how many of its layers run; with all of them, a final norm follows."""

    def __init__(self, build: Build, raw: Mapping[str, Any], num_layers: int | None = None) -> None:
        super().__init__()
        kind = str(raw.get("model_type", ""))
        is_clip = "clip" in kind and "siglip" not in kind
        act = "quick_gelu" if is_clip else "gelu_pytorch_tanh"
        size = self.size = read_int(raw, "hidden_size")
        depth = read_int(raw, "num_hidden_layers")
        used = depth if num_layers is None else num_layers
        if not 0 <= used <= depth:
            raise ModelError(f"config.json: the vision tower has {depth} layers, not {used}")
        eps = read_float(raw, "layer_norm_eps", 1e-5 if is_clip else 1e-6)
        settings = {**raw, "layer_norm_eps": eps}
        self.embeddings = VitEmbeddings(build, raw, is_clip)
        channels, self.patch, _ = self.embeddings.patch_embedding.kernel
        self.tile = (channels, self.embeddings.side * self.patch, self.embeddings.side * self.patch)
        self.pre_layrnorm = LayerNorm(build, size, eps, bias=True) if is_clip else None
        layers = [VitLayer(build, settings, act) for _ in range(used)]
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        self.post_layernorm = None
        if num_layers is None:
            self.post_layernorm = LayerNorm(build, size, eps, bias=True)
        self.unread = tuple(rf"encoder\.layers\.{i}\." for i in range(used, depth))
        self.unread += (r"head\.",)
        if num_layers is not None:
            self.unread += (r"post_layernorm\.",)

    def arrange(self, n: int, channels: int, height: int, width: int) -> Arrangement:
        positions = self.embeddings.positions(height, width)
        return Arrangement(Segments.of([len(positions)] * n, positions.device), positions=positions)

    def forward(self, images: torch.Tensor, arrangement: Arrangement) -> torch.Tensor:
        """[n, channels, height, width] -> [n, tokens, hidden_size]."""
        assert arrangement.positions is not None
        x = self.embeddings(images, arrangement.positions)
        n, tokens, _ = x.shape
        x = x.flatten(0, 1)
        if self.pre_layrnorm is not None:
            x = self.pre_layrnorm(x)
        segments = arrangement.segments
        layers = self.encoder["layers"]
        assert isinstance(layers, nn.ModuleList)
        for layer in layers:
            x = layer(x, segments)
        if self.post_layernorm is not None:
            x = self.post_layernorm(x)
        return x.unflatten(0, (n, tokens))
