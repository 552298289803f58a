"""How weights of 4 bits lie in memory on a GPU.

Int16 words of four numbers, where word i of a chunk of 128 columns holds columns i, 32 + i,
64 + i and 96 + i from the low bits on. So the numbers that neighbouring words have in the same
bits, a *plane*, are neighbouring columns: x is read as it lies, and a plane is an operand of the
tensor cores as it is. The last chunk may be padded; x is zero there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton

from penstock.ops import quantized as plain

CHUNK = 128  # columns
WORDS = 32  # of a chunk
SLAB = 1 << 24  # numbers that are packed at one time


class Packed(NamedTuple):
    """A matrix in this module's layout: [out, in], or one for each expert [experts, out, in]."""

    words: torch.Tensor  # [..., out, ceil(in / 128) * 32] int16
    scales: torch.Tensor  # [..., out, num_groups]: floats, e4m3, or e8m0 as uint8
    zeros: torch.Tensor | None  # the same shape, uint8
    group_size: int
    is_fp4: bool = False
    global_scale: torch.Tensor | None = None  # [..., out] float32

    @property
    def num_groups(self) -> int:
        return self.scales.shape[-1]

    @property
    def parts(self) -> int:
        """Groups of a chunk; 1 where whole chunks share a scale."""
        return CHUNK // self.group_size if self.group_size < CHUNK and self.num_groups > 1 else 1

    @property
    def chunks_each(self) -> int:
        """That share a scale, where they do."""
        return int(max(triton.cdiv(self.group_size, CHUNK), 1))

    @property
    def constants(self) -> dict[str, Any]:
        """What a kernel is compiled for."""
        return {
            "FP4": self.is_fp4, "GLOBAL": self.global_scale is not None,
            "ZEROS": self.zeros is not None, "PARTS": self.parts,
        }  # fmt: skip

    def operands(self, unused: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Words, scales, zeros and the scale of all, as kernels take them; `unused` for none."""
        return (
            self.words,
            self.scales,
            self.words if self.zeros is None else self.zeros,
            unused if self.global_scale is None else self.global_scale,
        )

    def rows(self, start: int, end: int) -> Packed:
        return self._replace(
            words=self.words[start:end],
            scales=self.scales[start:end],
            zeros=None if self.zeros is None else self.zeros[start:end],
            global_scale=None if self.global_scale is None else self.global_scale[start:end],
        )


def prepare_w4(
    packed: torch.Tensor,  # [..., in / 2] uint8, as the reference has them
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group_size: int,
    bits: int = 4,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The numbers in this module's layout, [..., ceil(in / 128) * 32] int16, where it takes them.

    8 bits, and groups of unusual sizes, stay as they are.
    """
    in_features = packed.shape[-1] * 8 // bits
    if bits != 4 or not _takes(in_features, group_size):
        return packed, scales, zeros
    words = _pack_words(packed, in_features)
    return words, scales.contiguous(), None if zeros is None else zeros.contiguous()


def prepare_fp4(
    packed: torch.Tensor,  # [..., in / 2] uint8, as the reference has them
    scales: torch.Tensor,
    global_scale: torch.Tensor | None,
    group_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The same for e2m1 numbers."""
    in_features = packed.shape[-1] * 2
    if not _takes(in_features, group_size):
        return packed, scales, global_scale
    return _pack_words(packed, in_features), scales.contiguous(), global_scale


def _takes(in_features: int, group_size: int) -> bool:
    """Whether scales are those of whole chunks, or of planes or half ones."""
    return group_size % CHUNK == 0 or group_size in (16, 32, 64) or group_size >= in_features


def _pack_words(packed: torch.Tensor, in_features: int) -> torch.Tensor:
    rows = packed.reshape(-1, packed.shape[-1])
    num_words = triton.cdiv(in_features, CHUNK) * WORDS
    words = torch.empty((len(rows), num_words), dtype=torch.int16, device=packed.device)
    step = max(SLAB // max(in_features, 1), 1)
    for start in range(0, len(rows), step):
        numbers = plain.unpack_nibbles(rows[start : start + step])
        padded = F.pad(numbers, (0, num_words * 4 - in_features))
        chunks = padded.view(len(numbers), -1, 4, WORDS).int()  # [rows, chunks, planes, words]
        own = chunks[:, :, 0]
        for plane in range(1, 4):
            own = own | (chunks[:, :, plane] << (4 * plane))
        words[start : start + step] = own.flatten(1).to(torch.int16)
    return words.view(*packed.shape[:-1], num_words)
