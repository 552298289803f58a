"""Products with matrices in GGUF quantization blocks, in plain torch.

A backend may use its own layout, which `prepare_gguf` creates. Its result is passed to the other
ops unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from penstock.ops.blocks import BlockTensor
from penstock.ops.experts import ACTIVATIONS, run_by_expert
from penstock.ops.gguf_blocks import dequantize

SLAB = 1 << 24  # numbers dequantized at a time


class BlockMatrix(Protocol):
    """A matrix in quantization blocks, in the layout of a backend."""

    @property
    def type_name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    def rows(self, start: int, end: int) -> BlockMatrix:
        """Rows [start, end), sharing memory."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors in memory, by name."""


def prepare_gguf(weight: BlockTensor, device: torch.device) -> BlockTensor:
    """The matrix in this backend's layout on `device`, in about the same number of bytes."""
    return weight.to(device)


def stack_gguf(parts: Sequence[BlockTensor]) -> BlockTensor:
    """Concatenate prepared matrices of one type by rows."""
    return parts[0].with_data(torch.cat([part.data for part in parts]))


def gguf_linear(
    x: torch.Tensor,  # [n, in]
    weight: BlockTensor,  # [out, in], prepared
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,  # [n, out], rows may have any stride
) -> torch.Tensor:
    """x weight^T + bias, into `out` if given. Dequantizes one slab of the weight at a time."""
    rows, columns = weight.shape
    if out is None:
        out = torch.empty((len(x), rows), dtype=x.dtype, device=x.device)
    step = max(SLAB // columns, 1)
    for start in range(0, rows, step):
        end = min(start + step, rows)
        floats = dequantize(weight.rows(start, end)).to(x.dtype)
        out[:, start:end] = F.linear(x, floats, None if bias is None else bias[start:end])
    return out


def gguf_embed(token_ids: torch.Tensor, weight: BlockTensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize some rows: token_ids [n] -> [n, in]."""
    return dequantize(weight.with_data(weight.data[token_ids])).to(dtype)


def gguf_experts(
    x: torch.Tensor,  # [n, hidden]
    weights: torch.Tensor,  # [n, top_k] float32
    ids: torch.Tensor,  # [n, top_k]
    gate_up: Sequence[BlockTensor],  # gate above up of each expert; or all gates, and all ups
    down: BlockTensor,  # [experts * hidden, intermediate]
    activation: str,
) -> torch.Tensor:
    """Each token's weighted sum over its experts, whose matrices are concatenated by rows."""
    num_experts = down.shape[0] // x.shape[1]

    def linear(expert: int, rows: torch.Tensor, matrix: BlockTensor) -> torch.Tensor:
        size = matrix.shape[0] // num_experts
        return gguf_linear(rows, matrix.rows(expert * size, (expert + 1) * size), None)

    def run(expert: int, rows: torch.Tensor) -> torch.Tensor:
        both = torch.cat([linear(expert, rows, matrix) for matrix in gate_up], dim=-1)
        return linear(expert, ACTIVATIONS[activation](*both.chunk(2, dim=-1)), down)

    return run_by_expert(x, weights, ids, num_experts, run)
