"""The memory layout of quantized weights on a GPU.

4 bits (`w4`, `fp4`): int16 words of four numbers. Word i of a chunk of 128 columns holds columns i,
32 + i, 64 + i and 96 + i, from the low bits up. The numbers at the same bits of neighbouring words,
a *plane*, are therefore neighbouring columns: x is read in its own order, and a plane is directly
an operand of the tensor cores. The last chunk may be padded; x is zero there.

Bytes: 8-bit integers (`w8`), or two 4-bit table indexes (`table`). In a table, byte i of a chunk of
64 bytes holds columns i and 64 + i of 128.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
import triton

from penstock.ops import quantized as plain

CHUNK = 128  # columns of a chunk of words
WORDS = 32  # words of a chunk
BYTES = 64  # bytes of a chunk
SLAB = 1 << 24  # numbers packed at a time


class Packed(NamedTuple):
    """A matrix in one of these layouts: [out, in], or per expert [experts, out, in]."""

    data: torch.Tensor  # [..., out, ceil(in / 128) * 32] int16, or [..., out, bytes] uint8
    scales: torch.Tensor  # [..., out, num_groups]: floats, e4m3, or e8m0 as uint8
    zeros: torch.Tensor | None  # the same shape, uint8; None: half of the range
    group_size: int
    kind: Literal["w4", "fp4", "w8", "table"] = "w4"
    # fp4: factor of each row [..., out] float32; table: its values [16] float32.
    extra: torch.Tensor | None = None

    @property
    def is_words(self) -> bool:
        return self.data.dtype == torch.int16

    @property
    def width(self) -> int:
        """The size of a row: chunks of words, or bytes."""
        return self.data.shape[-1] // WORDS if self.is_words else self.data.shape[-1]

    @property
    def num_groups(self) -> int:
        return self.scales.shape[-1]

    @property
    def parts(self) -> int:
        """Quantization groups per chunk; 1 if whole chunks share a scale.

        For bytes, 2 means any number.
        """
        if not self.is_words:
            return 1 if self.group_width % BYTES == 0 else 2
        return CHUNK // self.group_size if self.group_size < CHUNK and self.num_groups > 1 else 1

    @property
    def group_width(self) -> int:
        """Chunks of words that share a scale; for bytes, columns.

        If a whole row shares one scale, it is a number of columns that is a multiple of a chunk.
        """
        if self.is_words:
            return int(max(triton.cdiv(self.group_size, CHUNK), 1))
        return max(self.width * 2 // BYTES, 1) * BYTES if self.num_groups == 1 else self.group_size

    @property
    def constants(self) -> dict[str, Any]:
        """The compile-time arguments of a kernel."""
        return {
            "KIND": self.kind, "GLOBAL": self.kind == "fp4" and self.extra is not None,
            "ZEROS": self.zeros is not None, "PARTS": self.parts,
        }  # fmt: skip

    def is_even(self, in_features: int) -> bool:
        """Whether rows with this many columns consist of whole chunks."""
        return in_features % (BYTES if self.kind == "w8" else CHUNK) == 0

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        """Data, scales, zeros and `extra` as kernel arguments; a placeholder for each None."""
        return (
            self.data,
            self.scales,
            self.data if self.zeros is None else self.zeros,
            self.data if self.extra is None else self.extra,
        )

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.width, self.num_groups, self.group_width

    def rows(self, start: int, end: int) -> Packed:
        own = slice(start, end)
        return self._replace(
            data=self.data[own],
            scales=self.scales[own],
            zeros=None if self.zeros is None else self.zeros[own],
            extra=self.extra if self.extra is None or self.kind == "table" else self.extra[own],
        )


def prepare_w4(
    packed: torch.Tensor,  # [..., in / 2] uint8, in the reference's layout
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group_size: int,
    bits: int = 4,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Convert to this module's layout, [..., ceil(in / 128) * 32] int16, if it supports them.

    8 bits, and quantization groups of unusual sizes, stay unchanged.
    """
    in_features = packed.shape[-1] * 8 // bits
    if bits != 4 or not _takes(in_features, group_size):
        return packed, scales, zeros
    words = _repack(packed, in_features, 4, WORDS, torch.int16)
    return words, scales.contiguous(), None if zeros is None else zeros.contiguous()


def prepare_fp4(
    packed: torch.Tensor,  # [..., in / 2] uint8, in the reference's layout
    scales: torch.Tensor,
    global_scale: torch.Tensor | None,
    group_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Like `prepare_w4`, for e2m1 numbers."""
    in_features = packed.shape[-1] * 2
    if not _takes(in_features, group_size):
        return packed, scales, global_scale
    words = _repack(packed, in_features, 4, WORDS, torch.int16)
    return words, scales.contiguous(), global_scale


def _takes(in_features: int, group_size: int) -> bool:
    """Whether each scale covers whole chunks, planes or half planes."""
    return group_size % CHUNK == 0 or group_size in (16, 32, 64) or group_size >= in_features


def prepare_table(
    packed: torch.Tensor,  # [..., in / 2] uint8, in the reference's layout
) -> torch.Tensor:
    """Convert to this module's layout: [..., ceil(in / 128) * 64] uint8."""
    return _repack(packed, 2 * packed.shape[-1], 2, BYTES, torch.uint8)


def _repack(
    packed: torch.Tensor, in_features: int, num_planes: int, size: int, dtype: torch.dtype
) -> torch.Tensor:
    """Pack 4-bit numbers into words of `num_planes`, from the low bits up, in chunks of `size`."""
    rows = packed.reshape(-1, packed.shape[-1])
    num_words = triton.cdiv(in_features, CHUNK) * size
    words = torch.empty((len(rows), num_words), dtype=dtype, device=packed.device)
    step = max(SLAB // max(in_features, 1), 1)
    for start in range(0, len(rows), step):
        numbers = plain.unpack_nibbles(rows[start : start + step])
        padded = F.pad(numbers, (0, num_words * num_planes - in_features))
        planes = padded.view(len(numbers), -1, num_planes, size).int()
        own = planes[:, :, 0]  # [rows, chunks, words]
        for plane in range(1, num_planes):
            own = own | (planes[:, :, plane] << (4 * plane))
        words[start : start + step] = own.flatten(1).to(dtype)
    return words.view(*packed.shape[:-1], num_words)
