"""Layers of vision towers, which run outside of the forward context.

Blocks may be sharded over ranks by heads and columns. What is before and behind them is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from penstock.layers.build import Build
from penstock.layers.linear import Linear, Part, column_linear, qkv_linear, row_linear
from penstock.layers.norm import Norm
from penstock.layers.sublayers import Angles
from penstock.ops.blocks import BlockTensor, Weight
from penstock.protocol.errors import ModelError

Activation = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
}


def activation(name: object) -> Activation:
    found = ACTIVATIONS.get(str(name))
    if found is None:
        raise ModelError(
            f"config.json: the vision tower's hidden_act {name!r:.80} is not supported, only "
            f"{', '.join(ACTIVATIONS)}"
        )
    return found


@dataclass(frozen=True)
class Segments:
    """Rows that attend to each other: [starts[i], starts[i + 1])."""

    starts: torch.Tensor  # [n + 1] int32

    @staticmethod
    def of(lengths: list[int], device: torch.device) -> Segments:
        ends = torch.tensor([0, *lengths]).cumsum(0)
        return Segments(ends.to(torch.int32).to(device))


@dataclass(frozen=True)
class Arrangement:
    """What a tower's layers need to know of patches, besides their pixels.

    It follows from the shape of a pass, so passes of one shape can share it.
    """

    segments: Segments
    angles: Angles | None = None  # of rotary embeddings
    positions: torch.Tensor | None = None  # learned ones, as wide as the layers


class Table(nn.Module):
    """A tensor such as learned position embeddings."""

    def __init__(self, build: Build, *shape: int) -> None:
        super().__init__()
        self.weight = build.empty(*shape)

    def expected(self) -> dict[tuple[str, str], tuple[int, ...]]:
        return {("weight", ""): tuple(self.weight.shape)}

    def load(self, parameter: str, part: str, tensor: Weight) -> None:
        assert not isinstance(tensor, BlockTensor), "not a matrix of a linear layer"
        self.weight.copy_(tensor)


def cut_patches(images: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Images [n, channels, ...] -> [n, rows, columns, channels * height * width]."""
    n, channels, full_height, full_width = images.shape
    rows, columns = full_height // height, full_width // width
    images = images[:, :, : rows * height, : columns * width]
    cut = images.reshape(n, channels, rows, height, columns, width)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(n, rows, columns, -1)


class PatchEmbedding(nn.Module):
    """A convolution whose stride is its kernel: a product with each flattened patch."""

    def __init__(
        self, build: Build, hidden_size: int, kernel: tuple[int, ...], bias: bool = False
    ) -> None:
        """`kernel`: channels and the size of a patch, such as (3, 14, 14)."""
        super().__init__()
        self.kernel = kernel
        self.weight = build.empty(hidden_size, *kernel)
        self.bias = build.empty(hidden_size) if bias else None

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """[n, channels * size] -> [n, hidden_size]."""
        return F.linear(patches.flatten(1), self.weight.flatten(1), self.bias)

    def patches_of(self, images: torch.Tensor) -> torch.Tensor:
        """Images [n, channels, height, width] -> [n, rows, columns, channels * size]."""
        return cut_patches(images, *self.kernel[1:])

    def expected(self) -> dict[tuple[str, str], tuple[int, ...]]:
        return {(name, ""): tuple(value.shape) for name, value in self.named_parameters()}

    def load(self, parameter: str, part: str, tensor: Weight) -> None:
        assert not isinstance(tensor, BlockTensor), "not a matrix of a linear layer"
        self.get_parameter(parameter).copy_(tensor)


class Undivided(Exception):
    """A vision tower cannot be sharded. Names what does not divide among the ranks."""


def share_of(build: Build, count: int, what: str) -> int:
    """This rank's share of a tower's `count` heads or columns."""
    if count % build.tp.size:
        raise Undivided(f"{count} {what}")
    return count // build.tp.size


def plain_linear(build: Build, in_features: int, out_features: int, bias: bool = True) -> Linear:
    return Linear(build, in_features, [Part("", out_features, 1)], bias)


def pixel_shuffle(x: torch.Tensor, scale: int) -> torch.Tensor:
    """Squares of patches as one row each: [n, patches, size] -> [n, squares, size * scale**2]."""
    n, patches, size = x.shape
    side = int(patches**0.5)
    squares = x.reshape(n, side // scale, scale, side // scale, scale, size)
    return squares.transpose(2, 3).reshape(n, (side // scale) ** 2, scale**2 * size)


def rotate(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Rotate [n, heads, head_dim] in float32, dimensions i and i + head_dim / 2 together.

    `angles`: cos and sin [n, 1, head_dim / 2].
    """
    cos, sin = angles
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def axial_angles(coordinates: torch.Tensor, frequencies: torch.Tensor) -> Angles:
    """cos and sin [n, 1, head_dim / 2] for patches at rows and columns [n, 2].

    `frequencies` [2, head_dim / 4]: of the dimensions that turn by row, then by column.
    """
    angles = coordinates.float()[:, :, None] * frequencies.to(coordinates.device)
    turned = angles.flatten(1).unsqueeze(1)
    return turned.cos(), turned.sin()


class VisionAttention(nn.Module):
    """Bidirectional attention inside each segment.

    Checkpoints have ``qkv`` and ``proj`` if `fused`, else ``q_proj``, ``k_proj``, ``v_proj`` and
    ``out_proj``.
    """

    def __init__(
        self,
        build: Build,
        hidden_size: int,
        num_heads: int,
        bias: bool = True,
        fused: bool = False,
        output_bias: bool | None = None,  # None: as of queries, keys and values
        interleaved: bool = False,  # dimensions 2i and 2i + 1 rotate together
    ) -> None:
        super().__init__()
        self.ops = build.ops
        self.rotate_rows = build.ops.find("rotate_rows")  # in place
        self.num_heads = share_of(build, num_heads, "heads")
        self.head_dim = hidden_size // num_heads
        self.fused = fused
        self.interleaved = interleaved
        output_bias = bias if output_bias is None else output_bias
        self.q_norm: Norm | None = None
        self.k_norm: Norm | None = None
        if fused:
            parts = {"": 3 * hidden_size}
            if build.tp.size > 1:
                parts = dict.fromkeys(("q", "k", "v"), hidden_size)  # each is sharded by heads
            self.qkv = column_linear(build, hidden_size, parts, bias)
            self.proj = row_linear(build, hidden_size, hidden_size, output_bias)
        else:
            self.qkv_proj = qkv_linear(
                build, hidden_size, num_heads, num_heads, self.head_dim, bias
            )
            self.out_proj = row_linear(build, hidden_size, hidden_size, output_bias)

    def forward(
        self, x: torch.Tensor, segments: Segments, angles: Angles | None = None
    ) -> torch.Tensor:
        qkv = self.qkv(x) if self.fused else self.qkv_proj(x)
        query, key, value = qkv.unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(1)
        if self.q_norm is not None and self.k_norm is not None:  # over all heads together
            query = self.q_norm(query.flatten(1)).view_as(query)
            key = self.k_norm(key.flatten(1)).view_as(key)
        if self.interleaved:  # scores do not change if both are in halves
            query = torch.cat([query[..., 0::2], query[..., 1::2]], dim=-1)
            key = torch.cat([key[..., 0::2], key[..., 1::2]], dim=-1)
        if angles is not None and self.rotate_rows is not None:
            self.rotate_rows(query, key, *angles)
        elif angles is not None:
            query, key = rotate(query, angles), rotate(key, angles)
        if key.stride() != value.stride():  # the fast kernels read both in the same way
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        attended = self.ops.varlen_attention(
            query, key, value, segments.starts, self.head_dim**-0.5
        ).flatten(1)
        return self.proj(attended) if self.fused else self.out_proj(attended)


class VisionBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, attention: VisionAttention, mlp: nn.Module, norms: Sequence[Norm]) -> None:
        super().__init__()
        self.norm1, self.norm2 = norms
        self.attn = attention
        self.mlp = mlp

    def forward(
        self, x: torch.Tensor, segments: Segments, angles: Angles | None = None
    ) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), segments, angles)
        return x + self.mlp(self.norm2(x))


class VisionMLP(nn.Module):
    """fc2(act(fc1(x)))."""

    def __init__(
        self, build: Build, size: int, intermediate_size: int, act: Activation, out: int = 0
    ) -> None:
        super().__init__()
        self.act = act
        share_of(build, intermediate_size, "columns")
        self.fc1 = column_linear(build, size, {"": intermediate_size}, bias=True)
        self.fc2 = row_linear(build, intermediate_size, out or size, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))
