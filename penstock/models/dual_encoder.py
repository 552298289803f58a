"""Dual encoders, CLIP and SigLIP: a text tower and a vision tower with one space of vectors.

A request is a text or an image. An image is a prompt of one placeholder, whose vector is the vision
tower's. It passes through the text tower with the rows of texts, and is put back behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from penstock.layers.build import Build
from penstock.layers.context import current_context
from penstock.layers.embedding import VocabEmbedding
from penstock.layers.norm import LayerNorm
from penstock.layers.quantization import DenseMethod
from penstock.layers.sublayers import RotaryAttention
from penstock.layers.vision import Arrangement, Table, VisionMLP, activation, plain_linear
from penstock.models.base import Hidden, Model, WeightTable
from penstock.models.config import read_float, read_int
from penstock.models.encoder import EncoderConfig, EncoderLayer, EncoderMLP
from penstock.models.vision import (
    TileTower,
    VisionModel,
    VisionTower,
    load_tower,
    vision_settings,
)
from penstock.models.vit import Vit
from penstock.protocol.errors import ModelError
from penstock.protocol.pooling import DualInputs

OLD_CLIP_END = 2  # an eos_token_id that is in many config.json and was never used


class ClipTower(TileTower):
    """The row of the class token, projected."""

    def __init__(self, build: Build, raw: Mapping[str, Any], size: int) -> None:
        super().__init__()
        self.build = build
        self.tower = Vit(build, vision_settings(raw))
        self.projection = plain_linear(build, self.tower.size, size, bias=False)
        self.unread = tuple(rf"tower\.{name}" for name in self.tower.unread)

    def forward(self, pixels: torch.Tensor, arrangement: Arrangement) -> torch.Tensor:
        rows: torch.Tensor = self.projection(self.tower(pixels, arrangement)[:, :1])
        return rows


class AttentionPool(nn.Module):
    """Attention of one learned query to all patches of an image, and an MLP behind it."""

    def __init__(self, build: Build, raw: Mapping[str, Any]) -> None:
        super().__init__()
        size = read_int(raw, "hidden_size")
        self.num_heads = read_int(raw, "num_attention_heads")
        self.probe = Table(build, 1, 1, size)
        self.in_proj = plain_linear(build, size, 3 * size)
        self.out_proj = plain_linear(build, size, size)
        self.layernorm = LayerNorm(build, size, read_float(raw, "layer_norm_eps", 1e-6), bias=True)
        width, act = read_int(raw, "intermediate_size"), raw.get("hidden_act", "gelu_pytorch_tanh")
        self.mlp = VisionMLP(build, size, width, activation(act))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, patches, hidden_size] -> [n, hidden_size]"""
        rows = torch.cat([self.probe.weight.expand(len(x), 1, -1), x], dim=1)
        heads = self.in_proj(rows).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads[0, :, :, :1], heads[1, :, :, 1:], heads[2, :, :, 1:]
        attended = F.scaled_dot_product_attention(query, key, value)  # [n, heads, 1, head_dim]
        pooled = self.out_proj(attended.flatten(1))
        return pooled + self.mlp(self.layernorm(pooled))


class SiglipTower(TileTower):
    def __init__(self, build: Build, raw: Mapping[str, Any], size: int) -> None:
        super().__init__()
        vision = vision_settings(raw)
        self.build = build
        self.tower = Vit(build, vision)
        if self.tower.size != size:
            raise ModelError(
                f"config.json: the towers must give vectors of one size, got {size} for texts and "
                f"{self.tower.size} for images"
            )
        self.head = AttentionPool(build, vision)
        self.unread = tuple(rf"tower\.{name}" for name in self.tower.unread)

    def forward(self, pixels: torch.Tensor, arrangement: Arrangement) -> torch.Tensor:
        rows: torch.Tensor = self.head(self.tower(pixels, arrangement))
        return rows.unsqueeze(1)


class DualEncoder(VisionModel, Model):
    """The text tower, and what both have in common. Subclasses say what differs."""

    tower_prefix = "vision"
    tower_class: ClassVar[type[VisionTower]]
    attention: ClassVar[Literal["causal", "bidirectional"]]
    projection_bias: ClassVar[bool]
    defaults: ClassVar[Mapping[str, Any]]  # of the text tower
    renamed: ClassVar[Mapping[str, str]] = {
        r"^text_model\.(embeddings|encoder)\.": "",
        r"^text_model\.": "",
        r"^final_layer_norm\.": "final_norm.",
        r"^(layers\.\d+\.self_attn)\.out_proj\.": r"\1.o_proj.",
        r"^(layers\.\d+)\.layer_norm1\.": r"\1.post_attention_layernorm.",
        r"^(layers\.\d+)\.layer_norm2\.": r"\1.post_mlp_layernorm.",
        r"^(layers\.\d+\.mlp)\.fc1\.": r"\1.up_proj.",
        r"^(layers\.\d+\.mlp)\.fc2\.": r"\1.down_proj.",
        r"^(text_projection|head)\.": "projection.",
        r"^visual_projection\.": "vision.projection.",
        r"^vision_model\.head\.attention\.in_proj_": "vision.head.in_proj.",
        r"^vision_model\.head\.attention\.": "vision.head.",
        r"^vision_model\.head\.probe$": "vision.head.probe.weight",
        r"^vision_model\.head\.": "vision.head.",
        r"^vision_model\.": "vision.tower.",
    }

    @classmethod
    def embedding_size(cls, raw: Mapping[str, Any]) -> int:
        """The size of vectors."""
        raise NotImplementedError

    @classmethod
    def inputs(cls, raw: Mapping[str, Any]) -> DualInputs:
        """What becomes of a text's tokens."""
        raise NotImplementedError

    @classmethod
    def create(cls, build: Build, raw: Mapping[str, Any]) -> DualEncoder:
        given = {key: value for key, value in raw.items() if value is not None}
        return cls(build, EncoderConfig.from_raw({**cls.defaults, **given}))

    def __init__(self, build: Build, config: EncoderConfig) -> None:
        super().__init__()
        config.check_build(build, "a dual encoder")
        self.build, self.config = build, config
        self.vocab_size, self.hidden_size = config.vocab_size, self.embedding_size(config.raw)
        self.dual = self.inputs(config.raw)
        plain, size = replace(build, linear_method=DenseMethod()), config.hidden_size
        self.token_embedding = VocabEmbedding(plain, config.vocab_size, size)
        self.position_embedding = VocabEmbedding(plain, config.max_position, size)
        self.layers = nn.ModuleList(self.layer(index) for index in range(config.num_layers))
        self.final_norm = self.norm()
        self.projection = plain_linear(build, size, self.hidden_size, self.projection_bias)
        ignored = (r"(^|\.)position_ids$", r"^logit_(scale|bias)$")
        self.weights = WeightTable(ignored, {**self.renamed})
        load_tower(self, build, lambda own: self.tower_class(own, config.raw, self.hidden_size))

    def norm(self) -> LayerNorm:
        return LayerNorm(self.build, self.config.hidden_size, self.config.norm_eps, bias=True)

    def layer(self, index: int) -> EncoderLayer:
        config = self.config
        attention = RotaryAttention(
            self.build, f"layers.{index}", config.hidden_size, config.num_heads, config.num_heads,
            config.head_dim, None, qkv_bias=True, output_bias=True, kind=self.attention,
        )  # fmt: skip
        mlp = EncoderMLP(self.build, config, is_gated=False, up_bias=True, down_bias=True)
        return EncoderLayer(attention, mlp, self.norm(), self.norm(), norm_first=True)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.token_embedding(token_ids)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> Hidden:
        x = x + self.position_embedding(positions)
        for layer in self.layers:
            x = layer(x, None)
        states = self.projection(self.final_norm(x))
        media = current_context().media
        if media is not None:
            states[media.rows] = media.values.to(states.dtype)
        return Hidden(states)


class CLIPModel(DualEncoder):
    """The vector of a text is that of its first end token."""

    tower_class = ClipTower
    attention = "causal"
    projection_bias = False
    defaults = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "eos_token_id": 49_407}

    @classmethod
    def embedding_size(cls, raw: Mapping[str, Any]) -> int:
        return read_int(raw, "projection_dim", 512)

    @classmethod
    def inputs(cls, raw: Mapping[str, Any]) -> DualInputs:
        end = read_int(raw, "eos_token_id", low=0)
        return DualInputs(end_token_id=None if end == OLD_CLIP_END else end)


class SiglipModel(DualEncoder):
    """The vector of a text is that of its last token. Texts are padded to the longest that the
    model takes, and see the padding."""

    tower_class = SiglipTower
    attention = "bidirectional"
    projection_bias = True
    defaults = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}

    @classmethod
    def embedding_size(cls, raw: Mapping[str, Any]) -> int:
        return read_int(raw, "projection_size", read_int(raw, "hidden_size"))

    @classmethod
    def inputs(cls, raw: Mapping[str, Any]) -> DualInputs:
        return DualInputs(num_tokens=read_int(raw, "max_position_embeddings"))
