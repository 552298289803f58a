"""Turns GGUF blocks into floats, with plain torch operations.

Each format has one function that takes whole blocks, ``[num_blocks, block_bytes]`` uint8, and
fills ``[num_blocks, block_size]`` float32. A scale is multiplied in before an offset is added,
as two roundings: the results are those of ggml's reference, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from penstock.loading.gguf_file import GGMLType, GGUFTensor
from penstock.protocol.errors import ModelError

# Elements dequantized at a time: several passes go over them, which should hit the cache, but each
# pass is a parallel region, and on a busy machine those are dear.
_CHUNK_ELEMENTS = 2**20


def dequantize(
    tensor: GGUFTensor, data: npt.NDArray[np.uint8] | torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`tensor`, whose bytes are `data`, as float32 in its own shape.

    `out`, when given, is a contiguous float32 tensor of that shape, which is filled and returned.
    Raises ModelError for a format that is not in SUPPORTED_TYPES.
    """
    check_supported(tensor)
    source = data if isinstance(data, torch.Tensor) else torch.from_numpy(data)
    if out is None:
        out = torch.empty(tensor.shape, dtype=torch.float32, device=source.device)
    _dequantize_blocks(tensor.type, source, out.view(-1))
    return out


def check_supported(tensor: GGUFTensor, path: Path | None = None) -> None:
    """Raise ModelError if `tensor` (of the file `path`) cannot be turned into floats."""
    if tensor.type.name not in SUPPORTED_TYPES:
        where = "" if path is None else f"{path}: "
        raise ModelError(
            f"{where}tensor {tensor.name!r} is of type {tensor.type.name}, which is not supported; "
            f"supported are {', '.join(SUPPORTED_TYPES)}: choose a file quantized to one of them"
        )


def _dequantize_blocks(ggml_type: GGMLType, source: torch.Tensor, out: torch.Tensor) -> None:
    fill = _FILL[ggml_type.name]
    blocks = source.view(-1, ggml_type.block_bytes)
    rows = out.view(-1, ggml_type.block_size)
    step = _CHUNK_ELEMENTS // ggml_type.block_size
    for start in range(0, len(blocks), step):
        fill(blocks[start : start + step], rows[start : start + step])


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of every block, as float32: [num_blocks, 1]."""
    return blocks[:, start : start + 2].view(torch.float16).float()


def _nibbles(packed: torch.Tensor, out: torch.Tensor) -> None:
    """Low halves of `packed` [..., n], then high halves, into `out` [..., 2, n]."""
    packed = packed.contiguous()  # one strided pass instead of two
    out[..., 0, :] = packed & 0x0F
    out[..., 1, :] = packed >> 4


def _bits(packed: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """`count` fields of `width` bits of each byte, lowest first: [..., n] -> [..., count, n]."""
    shifts = torch.arange(0, count * width, width, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-2) >> shifts.unsqueeze(-1)) & ((1 << width) - 1)


def _f32(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks.view(torch.float32))


def _f16(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks.view(torch.float16))


def _bf16(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks.view(torch.bfloat16))


def _q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    # scale: f16 | 32 x int8
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(_half(blocks, 0))


def _q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    # scale: f16 | 16 x (element i, element i + 16)
    _nibbles(blocks[:, 2:], out.view(-1, 2, 16))
    out.sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    # scale: f16 | minimum: f16 | as Q4_0
    _nibbles(blocks[:, 4:], out.view(-1, 2, 16))
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    # scale: f16 | 32 x the fifth bit | low four bits as Q4_0
    _five_bits(blocks[:, 2:6], blocks[:, 6:], out)
    out.sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    # scale: f16 | minimum: f16 | as Q5_0
    _five_bits(blocks[:, 4:8], blocks[:, 8:], out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _five_bits(high: torch.Tensor, low: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(low, out.view(-1, 2, 16))
    # [n, 4] -> [n, 8, 4] -> [n, 4, 8]: bit i of byte j belongs to element 8 j + i
    out.view(-1, 4, 8).add_(_bits(high, 8, 1).transpose(1, 2), alpha=16)


def _q4_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    # scale: f16 | scale of minima: f16 | 12 bytes | 4 x 32 x (element i, element i + 32)
    _nibbles(blocks[:, 16:].view(-1, 4, 32), out.view(-1, 4, 2, 32))
    _scale_k(blocks, out)


def _q5_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    # as Q4_K, but with 32 bytes of fifth bits before the low four
    _nibbles(blocks[:, 48:].view(-1, 4, 32), out.view(-1, 4, 2, 32))
    # bit j of byte i belongs to element 32 j + i
    out.view(-1, 8, 32).add_(_bits(blocks[:, 16:48], 8, 1), alpha=16)
    _scale_k(blocks, out)


def _scale_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Scale the eight groups of 32, each by a six-bit scale and a six-bit minimum.

    Bytes 4 to 15 hold four scales, four minima (six bits each, and in the top two bits the top of
    the other four), then the low halves of the other four scales and minima.
    """
    scales, minima, rest = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    scale = torch.cat([scales & 0x3F, (rest & 0x0F) | ((scales >> 2) & 0x30)], dim=1)  # [n, 8]
    minimum = torch.cat([minima & 0x3F, (rest >> 4) | ((minima >> 2) & 0x30)], dim=1)
    groups = out.view(-1, 8, 32)
    groups.mul_((_half(blocks, 0) * scale).unsqueeze(-1))
    groups.sub_((_half(blocks, 2) * minimum).unsqueeze(-1))


def _q6_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    # 2 x 64 x low four bits | 2 x 32 x four fields of high two bits | 16 x scale: int8 | f16
    _nibbles(blocks[:, :128].view(-1, 2, 64), out.view(-1, 2, 2, 64))
    out.view(-1, 2, 4, 32).add_(_bits(blocks[:, 128:192].view(-1, 2, 32), 4, 2), alpha=16)
    scale = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)  # [n, 16]
    out.sub_(32).view(-1, 16, 16).mul_(scale.unsqueeze(-1))


_FILL: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}

SUPPORTED_TYPES: tuple[str, ...] = tuple(_FILL)
