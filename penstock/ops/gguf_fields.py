"""Extracts bit fields from GGUF quantization blocks: [num_blocks, block_bytes] uint8."""

from __future__ import annotations

import torch


def half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of every quantization block: [num_blocks, 1]."""
    return view_as(blocks[:, start : start + 2], torch.float16)


def view_as(fields: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes [..., n] as little-endian numbers of another type: an aligned copy."""
    return fields.clone(memory_format=torch.contiguous_format).view(dtype)


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The low nibbles of packed [..., n], then the high nibbles: [..., 2, n]."""
    packed = packed.contiguous()  # one strided pass instead of two
    return torch.stack([packed & 0x0F, packed >> 4], dim=-2)


def bits(packed: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """`count` fields of `width` bits of each number, lowest first: [..., n] -> [..., count, n]."""
    shifts = torch.arange(0, count * width, width, dtype=packed.dtype, device=packed.device)
    return (packed.unsqueeze(-2) >> shifts.unsqueeze(-1)) & ((1 << width) - 1)


def bits_in_order(packed: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """Like `bits`, with the fields of a number consecutive: [..., n] -> [..., n * count]."""
    return bits(packed, count, width).transpose(-1, -2).flatten(-2)
