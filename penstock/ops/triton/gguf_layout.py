"""The memory layout of GGUF weights on a GPU.

In a file, quantization blocks of 17 to 210 bytes mix scales and numbers, so loads of 16 bytes do
not fit. Here each kind of field has its own tensor, in as many bytes as in the file:

- `words`, int32: the low `low` bits of the numbers (2, 4 or 8). Four words, a *quad*, are one
  thread's load and hold 512 / (4 * low) neighbouring columns. Field f of a quad's word w is its
  column 4 f + w. The fields at the same bits of the four words, a *plane*, are therefore four
  neighbouring columns, and x is read in its own order.
- `high`, int32: the bits above those, if any, in the same order. Two or four quads, as many as fill
  the fields, share four words: the bits of quad q are shifted up by q % n numbers. Rows are padded
  to whole quads.
- `first`, `second`, `third`: scales, as `gguf_decode.py` reads them.

IQ1, IQ2 and IQ3 have table indexes instead of numbers. `words` are their low bits and the other
fields are those of the file; `gguf_grid_decode.py` turns them into words of 8-bit numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from penstock.ops.blocks import BlockTensor
from penstock.ops.gguf_blocks import (
    E2M1_DOUBLED,
    FORMATS,
    IQ4_VALUES,
    iq4_xs_scales,
    k_scales,
    q3_k_scales,
)
from penstock.ops.gguf_fields import half, view_as
from penstock.ops.gguf_grids import GRIDS, table

SLAB = 1 << 24  # numbers repacked at a time

Scales = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
BlockField = Callable[[torch.Tensor], torch.Tensor]


class Layout(NamedTuple):
    """One GGUF type, as kernels are compiled for it."""

    kind: str  # how scales are stored, for `gguf_decode.scales`
    low: int  # bits of a number in `words`
    high: int  # further bits, in `high`
    zero: int  # zero point of the numbers
    group: int  # columns that share a scale
    scales: Scales  # quantization blocks [n, block_bytes] -> up to three tensors [n, ...]
    table: tuple[int, ...] | None = None  # values of the numbers, if they are indexes
    grid_indices: BlockField | None = None  # quantization blocks -> [n, ...], of grid types

    @property
    def columns(self) -> int:
        """Columns per element of `words`."""
        return 32 // self.low if self.grid_indices is None else GRIDS[self.kind].each

    @property
    def offset(self) -> bool:
        """Whether an offset is added after scaling."""
        return self.kind in ("pair", "nibbles", "six bits, minima")


class Planes(NamedTuple):
    """A matrix [out, in], or several concatenated by rows."""

    type_name: str
    words: torch.Tensor  # [out, in / layout.columns] int32; of a grid, its indexes
    high: torch.Tensor | None  # [out, about in * high / 32] int32
    first: torch.Tensor  # [out, ...]
    second: torch.Tensor | None
    third: torch.Tensor | None
    grid: torch.Tensor | None = None  # the grid, shared by all matrices of the type

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.type_name]

    @property
    def shape(self) -> tuple[int, int]:
        rows, words = self.words.shape
        return rows, words * self.layout.columns

    @property
    def num_quads(self) -> int:
        """Quads of one row."""
        return self.shape[1] * self.layout.low // 128

    @property
    def pointers(self) -> tuple[torch.Tensor, ...]:
        """The pointer arguments of a kernel: a grid replaces high bits.

        Missing tensors are not read.
        """
        optional = (self.high if self.grid is None else self.grid, self.second, self.third)
        high, second, third = (self.words if one is None else one for one in optional)
        return self.words, high, self.first, second, third

    @property
    def constants(self) -> dict[str, Any]:
        """The compile-time arguments of a kernel."""
        layout = self.layout
        return {
            "KIND": layout.kind, "LOW": layout.low, "HIGH": layout.high, "ZERO": layout.zero,
            "GROUP": layout.group, "TABLE": _bytes(layout.table), "OFFSET": layout.offset,
        }  # fmt: skip

    def rows(self, start: int, end: int) -> Planes:
        """Rows [start, end), sharing memory."""
        own: dict[str, Any] = {name: one[start:end] for name, one in self.tensors().items()}
        return self._replace(**own)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors in memory, by name."""
        named = {name: getattr(self, name) for name in _BY_ROW}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


_BY_ROW = ("words", "high", "first", "second", "third")


def prepare_gguf(weight: BlockTensor, device: torch.device) -> Planes:
    """Convert a matrix to this module's layout on `device`."""
    layout = LAYOUTS[weight.type_name]
    rows, columns = weight.shape
    step = max(SLAB // columns, 1)
    whole: dict[str, torch.Tensor] = {}
    for start in range(0, rows, step):
        part = weight.rows(start, min(start + step, rows))
        for name, tensor in _repack(part, layout, device).items():
            if name not in whole:
                shape = (rows, *tensor.shape[1:])
                whole[name] = torch.empty(shape, dtype=tensor.dtype, device=device)
            whole[name][start : start + len(tensor)] = tensor
    optional = {name: whole.get(name) for name in ("high", "second", "third")}
    if layout.grid_indices is not None:
        optional["grid"] = _grid(weight.type_name, device)
    return Planes(weight.type_name, whole["words"], first=whole["first"], **optional)


def stack_gguf(parts: Sequence[Planes]) -> Planes:
    """Concatenate matrices of one type by rows."""
    stacked: dict[str, Any] = {
        name: torch.cat([part.tensors()[name] for part in parts]) for name in parts[0].tensors()
    }
    return parts[0]._replace(**stacked)


def _repack(part: BlockTensor, layout: Layout, device: torch.device) -> dict[str, torch.Tensor]:
    rows = part.shape[0]
    blocks = part.data.to(device).reshape(-1, part.block_bytes)
    if layout.grid_indices is None:
        packed = _pack(part, blocks, layout)
    else:
        packed = {"words": layout.grid_indices(blocks).reshape(rows, -1)}
    for name, tensor in zip(("first", "second", "third"), layout.scales(blocks), strict=False):
        packed[name] = tensor.reshape(rows, -1)
    return packed


def _pack(part: BlockTensor, blocks: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
    """The numbers' low bits, and the bits above them."""
    rows, columns = part.shape
    numbers = FORMATS[part.type_name].numbers(blocks)
    fields, quads = 32 // layout.low, columns * layout.low // 128
    # [rows, quads, fields, 4]
    by_field = numbers.view(rows, quads, fields, 4).int()
    low = by_field & ((1 << layout.low) - 1)
    packed = {"words": _join(low, layout.low)}
    if layout.high:
        shared = layout.low // layout.high  # quads per four words
        above = F.pad(by_field >> layout.low, (0, 0, 0, 0, 0, -quads % shared))
        above = above.view(rows, -1, shared, fields, 4)
        places = torch.arange(shared, device=blocks.device, dtype=torch.int32).view(-1, 1, 1)
        packed["high"] = _join(
            (above << (places * layout.high)).sum(2, dtype=torch.int32), layout.low
        )
    return packed


def _bytes(table: tuple[int, ...] | None) -> int:
    """16 numbers + 128 as the bytes of one integer; 0 for None."""
    return 0 if table is None else int.from_bytes(bytes(value + 128 for value in table), "little")


def _join(fields: torch.Tensor, width: int) -> torch.Tensor:
    """Join fields [rows, quads, fields, n] into 32-bit words: [rows, quads * n]."""
    words = fields[:, :, 0]
    for index in range(1, fields.shape[2]):
        words = words | (fields[:, :, index] << (index * width))
    return words.flatten(1)


# -- scales


def _from(start: int, end: int, dtype: torch.dtype = torch.uint8) -> BlockField:
    """Bytes [start, end) of every quantization block, as numbers of a type."""
    return lambda blocks: view_as(blocks[:, start:end], dtype)


def _fields(*fields: BlockField) -> Scales:
    return lambda blocks: tuple(field(blocks) for field in fields)


_HALF = _from(0, 2, torch.float16)
_PAIR = _from(0, 4, torch.int32)  # two float16, the first in the low half


def _nibbles(numbers: torch.Tensor) -> torch.Tensor:
    """Pack neighbouring 4-bit numbers into bytes, first in the low nibble: [n, m] -> [n, m / 2]."""
    return numbers[:, 0::2] | (numbers[:, 1::2] << 4)


def _two_bits(numbers: torch.Tensor) -> torch.Tensor:
    """Pack four neighbouring 2-bit numbers into a byte: [n, m] -> [n, m / 4]."""
    pairs = numbers[:, 0::2] | (numbers[:, 1::2] << 2)
    return _nibbles(pairs)


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each scale with two bits of its minimum above it, and the other four bits of the minima."""
    scale, minimum = k_scales(blocks)
    return _PAIR(blocks), scale | (minimum << 6), _nibbles(minimum >> 2)


def _q3_k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scale = q3_k_scales(blocks)
    return half(blocks, 108), _nibbles(scale & 15), _two_bits(scale >> 4)


def _iq4_xs_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scale = iq4_xs_scales(blocks)
    return half(blocks, 0), _nibbles(scale & 15), _two_bits(scale >> 4)


# -- grid indexes


@functools.cache
def _grid(type_name: str, device: torch.device) -> torch.Tensor:
    """The format's table as `gguf_grid_decode.py` reads it: int32."""
    grid = table(type_name)
    if GRIDS[type_name].each == 8:
        grid = grid[:, [0, 4, 2, 6, 1, 5, 3, 7]]
    return view_as(grid, torch.int32).flatten().to(device)


def _on_grid(type_name: str, indices: BlockField, scales: Scales) -> Layout:
    return Layout(type_name, 8, 0, 128, GRIDS[type_name].group, scales, grid_indices=indices)


_ON_GRIDS = [
    _on_grid(
        "IQ2_XXS", lambda blocks: blocks[:, 2:].view(-1, 8, 8)[:, :, :4],
        _fields(_HALF, lambda blocks: view_as(blocks[:, 2:], torch.int32)[:, 1::2]),
    ),
    _on_grid("IQ2_XS", _from(2, 66, torch.int16), _fields(_HALF, _from(66, 74))),
    # second, third: scale steps; signs, then the high bits of indexes
    _on_grid("IQ2_S", _from(2, 34), _fields(_HALF, _from(74, 82), _from(34, 74))),
    _on_grid("IQ3_XXS", _from(2, 66), _fields(_HALF, _from(66, 98, torch.int32))),
    # second, third: scale steps; the high bits of indexes, then signs
    _on_grid("IQ3_S", _from(2, 66), _fields(_HALF, _from(106, 110), _from(66, 106))),
    _on_grid("IQ1_S", _from(2, 34), _fields(_HALF, _from(34, 50, torch.int16))),
    _on_grid("IQ1_M", _from(0, 32), _fields(_from(48, 56, torch.int64), _from(32, 48))),
]  # fmt: skip

LAYOUTS: dict[str, Layout] = {
    "Q8_0": Layout("half", 8, 0, 128, 32, _fields(_HALF)),
    "Q4_0": Layout("half", 4, 0, 8, 32, _fields(_HALF)),
    "Q4_1": Layout("pair", 4, 0, 0, 32, _fields(_PAIR)),
    "Q5_0": Layout("half", 4, 1, 16, 32, _fields(_HALF)),
    "Q5_1": Layout("pair", 4, 1, 0, 32, _fields(_PAIR)),
    "Q2_K": Layout("nibbles", 2, 0, 0, 16, _fields(_from(80, 84, torch.int32), _from(0, 16))),
    "Q3_K": Layout("six bits", 2, 1, 4, 16, _q3_k_scales),
    "Q4_K": Layout("six bits, minima", 4, 0, 0, 32, _k_scales),
    "Q5_K": Layout("six bits, minima", 4, 1, 0, 32, _k_scales),
    "Q6_K": Layout(
        "bytes", 4, 2, 32, 16,
        _fields(_from(208, 210, torch.float16), _from(192, 208, torch.int8)),
    ),
    "IQ4_NL": Layout("half", 4, 0, 0, 32, _fields(_HALF), IQ4_VALUES),
    "IQ4_XS": Layout("six bits", 4, 0, 0, 32, _iq4_xs_scales, IQ4_VALUES),
    "MXFP4": Layout("exponent", 4, 0, 0, 32, _fields(_from(0, 1)), E2M1_DOUBLED),
    # Ternary numbers take two bits each; TQ1_0 takes 1.6 in a file.
    "TQ1_0": Layout("whole", 2, 0, 1, 256, _fields(_from(52, 54, torch.float16))),
    "TQ2_0": Layout("whole", 2, 0, 1, 256, _fields(_from(64, 66, torch.float16))),
    **{layout.kind: layout for layout in _ON_GRIDS},
}  # fmt: skip
