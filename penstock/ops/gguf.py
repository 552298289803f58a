"""Products with matrices that stay in the blocks of a GGUF file, in plain torch.

A backend may keep blocks in a layout of its own, which `prepare_gguf` makes; what it gives is
passed to the other ops as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from penstock.ops.blocks import BlockTensor
from penstock.ops.experts import ACTIVATIONS, run_by_expert
from penstock.ops.gguf_blocks import dequantize

SLAB = 1 << 24  # numbers that become floats at one time


class BlockMatrix(Protocol):
    """A matrix in blocks, as a backend keeps it."""

    @property
    def type_name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    def tensors(self) -> dict[str, torch.Tensor]:
        """What lies in memory, by name."""


def prepare_gguf(weight: BlockTensor, device: torch.device) -> BlockTensor:
    """The matrix as this backend keeps it, on `device`, in about as many bytes."""
    return weight.to(device)


def stack_gguf(parts: Sequence[BlockTensor]) -> BlockTensor:
    """Prepared matrices of one type, one above the other."""
    return parts[0].with_data(torch.cat([part.data for part in parts]))


def gguf_linear(
    x: torch.Tensor,  # [n, in]
    weight: BlockTensor,  # [out, in], prepared
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,  # [n, out], of rows that need not follow each other
) -> torch.Tensor:
    """x weight^T + bias; in `out` if given. A slab of the weight is in floats at one time."""
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
    """Some rows as floats: token_ids [n] -> [n, in]."""
    return dequantize(weight.with_data(weight.data[token_ids])).to(dtype)


def gguf_experts(
    x: torch.Tensor,  # [n, hidden]
    weights: torch.Tensor,  # [n, top_k] float32
    ids: torch.Tensor,  # [n, top_k]
    gate_up: Sequence[BlockTensor],  # each expert's gate above its up; or all gates, and all ups
    down: BlockTensor,  # [experts * hidden, intermediate]
    activation: str,
) -> torch.Tensor:
    """Each token through its experts, whose matrices stand one above the other."""
    num_experts = down.shape[0] // x.shape[1]

    def linear(expert: int, rows: torch.Tensor, matrix: BlockTensor) -> torch.Tensor:
        size = matrix.shape[0] // num_experts
        return gguf_linear(rows, matrix.rows(expert * size, (expert + 1) * size), None)

    def run(expert: int, rows: torch.Tensor) -> torch.Tensor:
        both = torch.cat([linear(expert, rows, matrix) for matrix in gate_up], dim=-1)
        return linear(expert, ACTIVATIONS[activation](*both.chunk(2, dim=-1)), down)

    return run_by_expert(x, weights, ids, num_experts, run)
