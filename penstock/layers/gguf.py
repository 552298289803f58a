"""Matrices that stay in GGUF quantization blocks, on devices whose ops decode them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.layers.quantization import LinearMethod, Shard, check_floats
from penstock.ops.blocks import BlockTensor, Weight
from penstock.ops.gguf import BlockMatrix

if TYPE_CHECKING:
    from penstock.layers.matrix import MatrixLayer

Matrix = BlockMatrix | torch.Tensor  # quantization blocks, or floats in the model's type


class GgufWeights:
    """A layer's parts while they load, and its matrices afterwards."""

    def __init__(self) -> None:
        self.parts: dict[str, Matrix] = {}
        self.matrices: list[Matrix] = []  # neighbours of one type are one matrix


class GgufMethod(LinearMethod):
    """Each part keeps its own GGUF type. Floats of a file are converted to the model's type.

    With `expert_blocks`, experts stay in quantization blocks, too (`layers/gguf_experts.py`).
    """

    def __init__(self, expert_blocks: bool = True) -> None:
        self.expert_blocks = expert_blocks

    def create_weights(self, layer: MatrixLayer) -> None:
        layer.gguf = GgufWeights()

    def load(
        self, layer: MatrixLayer, part: str, parameter: str, tensor: Weight, shard: Shard
    ) -> None:
        own = shard.cut(tensor)
        build, state = layer.build, layer.gguf
        if isinstance(own, BlockTensor):
            state.parts[part] = build.ops.prepare_gguf(own, build.device)
        else:
            check_floats(part, own)
            state.parts[part] = own.to(build.device, build.dtype)
        if len(state.parts) < len(layer.part_rows):
            return
        state.matrices = _joined([state.parts[name] for name in layer.part_rows], layer)
        state.parts.clear()
        for index, matrix in enumerate(state.matrices):
            for name, data in tensors_of(matrix).items():
                # A buffer, so that it counts in the model's size.
                layer.register_buffer(f"gguf_{index}_{name}", data, persistent=False)

    def apply(self, layer: MatrixLayer, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ops, matrices = layer.build.ops, layer.gguf.matrices
        output = torch.empty((len(x), layer.out_features), dtype=x.dtype, device=x.device)
        start = 0
        for matrix in matrices:
            own = slice(start, start + matrix.shape[0])
            own_bias = None if bias is None else bias[own]
            linear = ops.linear if isinstance(matrix, torch.Tensor) else ops.gguf_linear
            linear(x, matrix, own_bias, output[:, own])
            start = own.stop
        return output

    def embed(self, layer: MatrixLayer, rows: torch.Tensor) -> torch.Tensor:
        (matrix,) = layer.gguf.matrices
        ops = layer.build.ops
        embedded: torch.Tensor
        if isinstance(matrix, torch.Tensor):
            embedded = ops.embed(rows, matrix)
        else:
            embedded = ops.gguf_embed(rows, matrix, layer.build.dtype)
        return embedded


def tensors_of(matrix: Matrix) -> dict[str, torch.Tensor]:
    """The tensors in memory, by name."""
    return {"floats": matrix} if isinstance(matrix, torch.Tensor) else matrix.tensors()


def _joined(parts: list[Matrix], layer: MatrixLayer) -> list[Matrix]:
    """Concatenate neighbours of one type, so that they are multiplied at once."""
    runs: list[list[Matrix]] = []
    for part in parts:
        if runs and _kind(runs[-1][0]) == _kind(part):
            runs[-1].append(part)
        else:
            runs.append([part])
    joined: list[Matrix] = []
    for run in runs:
        if len(run) == 1:
            joined.append(run[0])
        elif isinstance(run[0], torch.Tensor):
            joined.append(torch.cat([part for part in run if isinstance(part, torch.Tensor)]))
        else:
            joined.append(layer.build.ops.stack_gguf(run))
    return joined


def _kind(matrix: Matrix) -> str:
    return "floats" if isinstance(matrix, torch.Tensor) else matrix.type_name
