"""Converts quantization blocks of one GGUF type to another type, without rounding.

Not every type has kernels on every device. If the numbers of a type are small integers times a
float16, a type with kernels can hold them exactly, in far less memory than floats.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch

from penstock.ops.blocks import BlockTensor
from penstock.ops.gguf_blocks import CHUNK_ELEMENTS, E2M1_DOUBLED, FORMATS, IQ4_VALUES
from penstock.ops.gguf_fields import half

# Quantization blocks of 32 numbers with a float16 scale.
TARGET_BYTES = {"Q4_0": 18, "Q5_0": 22, "Q8_0": 34}
TARGET_SIZE = 32
_E8M0_BIAS = 128  # the numbers are doubled
_HALF_EXPONENTS = (-24, 15)  # exponents of the powers of two in float16


class Recoding(NamedTuple):
    target: str
    scales: Callable[[torch.Tensor], torch.Tensor | None]  # [num_blocks, 1] float16
    values: tuple[int, ...] | None  # value of each number; None: the number minus 1


def recode(weight: BlockTensor, types: Collection[str]) -> BlockTensor | None:
    """The same matrix in quantization blocks of one of `types`; None if that needs rounding."""
    found = RECODINGS.get(weight.type_name)
    if found is None or found.target not in types:
        return None
    blocks = weight.data.reshape(-1, weight.block_bytes)
    scales = found.scales(blocks)
    if scales is None:
        return None
    ratio, block_bytes = weight.block_size // TARGET_SIZE, TARGET_BYTES[found.target]
    packed = blocks.new_empty(len(blocks) * ratio, block_bytes)
    step = max(CHUNK_ELEMENTS // weight.block_size, 1)
    for start in range(0, len(blocks), step):
        own = slice(start, start + step)
        signed = _signed(weight.type_name, found, blocks[own]).view(-1, TARGET_SIZE)
        repeated = scales[own].repeat_interleave(ratio, dim=0)
        packed[start * ratio : (start + step) * ratio] = _pack(found.target, repeated, signed)
    return BlockTensor(found.target, TARGET_SIZE, block_bytes, packed.view(len(weight.data), -1))


def _signed(type_name: str, found: Recoding, blocks: torch.Tensor) -> torch.Tensor:
    """The unscaled values of quantization blocks: [num_blocks, block_size] int8."""
    numbers = FORMATS[type_name].numbers(blocks)
    if found.values is None:
        return numbers.to(torch.int8) - 1
    table = torch.tensor(found.values, dtype=torch.int8, device=blocks.device)
    return table.index_select(0, numbers.view(-1).int())


def _pack(target: str, scales: torch.Tensor, signed: torch.Tensor) -> torch.Tensor:
    """Scales [n, 1] float16 and numbers [n, 32] int8 -> quantization blocks [n, bytes]."""
    parts = [scales.contiguous().view(torch.uint8)]
    if target == "Q8_0":
        return torch.cat([*parts, signed.view(torch.uint8)], dim=1)
    numbers = (signed + (8 if target == "Q4_0" else 16)).view(torch.uint8)
    if target == "Q5_0":  # bit i of byte j: element 8 j + i
        fifth = (numbers >> 4).view(-1, 4, 8)
        byte = fifth[..., 0]
        for bit in range(1, 8):
            byte = byte | (fifth[..., bit] << bit)
        parts.append(byte)
    low, high = (numbers & 15).chunk(2, dim=1)  # (element i, element i + 16)
    return torch.cat([*parts, low | (high << 4)], dim=1)


def _half_at(start: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda blocks: half(blocks, start)


def _powers_of_two(blocks: torch.Tensor) -> torch.Tensor | None:
    """MXFP4's scales as float16, or None if one does not fit."""
    exponents = blocks[:, :1].int() - _E8M0_BIAS
    low, high = _HALF_EXPONENTS
    if bool(((exponents < low) | (exponents > high)).any()):
        return None
    return torch.exp2(exponents.float()).half()


RECODINGS = {
    "MXFP4": Recoding("Q5_0", _powers_of_two, E2M1_DOUBLED),
    "IQ4_NL": Recoding("Q8_0", _half_at(0), IQ4_VALUES),
    "Q1_0": Recoding("Q4_0", _half_at(0), (-1, 1)),
    "TQ1_0": Recoding("Q4_0", _half_at(52), None),
    "TQ2_0": Recoding("Q4_0", _half_at(64), None),
}
