"""Dequantizes GGUF quantization blocks, in plain torch.

Each format has two functions. One extracts the integers of quantization blocks: ``[num_blocks,
block_bytes]`` uint8 to ``[num_blocks, block_size]`` uint8. The other scales them in place, as
float32. The scale is multiplied before the offset is added, with two roundings. The results equal
ggml's reference bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from penstock.ops.blocks import BlockTensor
from penstock.ops.gguf_fields import bits, bits_in_order, half, nibbles
from penstock.ops.gguf_grids import GRIDS, grid_numbers, scale_grid

# Elements dequantized at a time. Several passes go over them, which should hit the cache. But each
# pass is a parallel region, which is expensive on a busy machine.
CHUNK_ELEMENTS = 2**20

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


class BlockFormat(NamedTuple):
    """One type of quantization block."""

    numbers: Callable[[torch.Tensor], torch.Tensor]
    scale: Callable[[torch.Tensor, torch.Tensor], None]  # (blocks, numbers as float32)


def dequantize_blocks(
    type_name: str, block_bytes: int, source: torch.Tensor, out: torch.Tensor
) -> None:
    """Dequantize whole quantization blocks (uint8, any shape) into out: [elements] float32."""
    numbers, scale = FORMATS[type_name]
    blocks = source.reshape(-1, block_bytes)
    rows = out.view(len(blocks), -1)
    step = max(CHUNK_ELEMENTS // rows.shape[1], 1)
    for start in range(0, len(blocks), step):
        own, floats = blocks[start : start + step], rows[start : start + step]
        floats.copy_(numbers(own))
        scale(own, floats)


def dequantize(weight: BlockTensor) -> torch.Tensor:
    """A matrix as float32 [rows, columns], on its device."""
    out = torch.empty(weight.shape, device=weight.data.device)
    dequantize_blocks(weight.type_name, weight.block_bytes, weight.data, out.view(-1))
    return out


# -- numbers


def _four_bits(start: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """16 bytes from `start`; byte i holds (element i, element i + 16)."""
    return lambda blocks: nibbles(blocks[:, start:]).flatten(1)


def _five_bits(start: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """From `start`: 32 fifth bits, then the low four bits as in `_four_bits`."""

    def numbers(blocks: torch.Tensor) -> torch.Tensor:
        low = nibbles(blocks[:, start + 4 :]).flatten(1)
        # [n, 4] -> [n, 8, 4] -> [n, 4, 8]: bit i of byte j belongs to element 8 j + i
        high = bits(blocks[:, start : start + 4], 8, 1).transpose(1, 2).flatten(1)
        return low | (high << 4)

    return numbers


def _q8_0_numbers(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:] ^ 128  # int8 + 128


def _q2_k_numbers(blocks: torch.Tensor) -> torch.Tensor:
    # 16 x (scale: 4 bits, minimum: 4 bits) | 2 x 32 x four fields of two bits | f16 | f16
    return bits(blocks[:, 16:80].view(-1, 2, 32), 4, 2).flatten(1)


def _q3_k_numbers(blocks: torch.Tensor) -> torch.Tensor:
    # 32 x third bits | as Q2_K | 12 bytes of scales | f16; bit j of byte i: element 32 j + i
    low = bits(blocks[:, 32:96].view(-1, 2, 32), 4, 2).flatten(1)
    return low | (bits(blocks[:, :32], 8, 1).flatten(1) << 2)


def _q4_k_numbers(blocks: torch.Tensor) -> torch.Tensor:
    # scale: f16 | scale of minima: f16 | 12 bytes | 4 x 32 x (element i, element i + 32)
    return nibbles(blocks[:, 16:].view(-1, 4, 32)).flatten(1)


def _q5_k_numbers(blocks: torch.Tensor) -> torch.Tensor:
    # as Q4_K, but with 32 bytes of fifth bits before the low four; bit j of byte i: 32 j + i
    low = nibbles(blocks[:, 48:].view(-1, 4, 32)).flatten(1)
    return low | (bits(blocks[:, 16:48], 8, 1).flatten(1) << 4)


def _q6_k_numbers(blocks: torch.Tensor) -> torch.Tensor:
    # 2 x 64 x low four bits | 2 x 32 x four fields of high two bits | 16 x scale: int8 | f16
    low = nibbles(blocks[:, :128].view(-1, 2, 64)).flatten(1)
    return low | (bits(blocks[:, 128:192].view(-1, 2, 32), 4, 2).flatten(1) << 4)


def _iq4_xs_numbers(blocks: torch.Tensor) -> torch.Tensor:
    # f16 | high two bits of 8 scales | low four of them | 8 x 16 x (element i, element i + 16)
    return nibbles(blocks[:, 8:].view(-1, 8, 16)).flatten(1)


def _tq1_0_numbers(blocks: torch.Tensor) -> torch.Tensor:
    # 32 + 16 x five base-3 digits | 4 x four digits | f16; a byte is a fraction, top digit first
    def digits(packed: torch.Tensor, count: int) -> torch.Tensor:
        powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8, device=packed.device)
        shifted = packed.unsqueeze(-2) * powers[:count, None]  # modulo 256
        return ((shifted.to(torch.int16) * 3) >> 8).to(torch.uint8).flatten(1)

    parts = [(blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4)]
    return torch.cat([digits(packed, count) for packed, count in parts], dim=1)


def _tq2_0_numbers(blocks: torch.Tensor) -> torch.Tensor:
    # as Q2_K's | f16
    return bits(blocks[:, :64].view(-1, 2, 32), 4, 2).flatten(1)


def _nvfp4_numbers(blocks: torch.Tensor) -> torch.Tensor:
    # 4 x scale: 8 bits | 4 x 8 x (element i, element i + 8)
    return nibbles(blocks[:, 4:].view(-1, 4, 8)).flatten(1)


def _q1_0_numbers(blocks: torch.Tensor) -> torch.Tensor:
    # f16 | 16 bytes; bit i of byte j: element 8 j + i
    return bits_in_order(blocks[:, 2:], 8, 1)


# -- scales


def k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Six-bit scales and minima of the eight sub-blocks of Q4_K and Q5_K: [num_blocks, 8] uint8.

    Bytes 4 to 7 hold four scales and bytes 8 to 11 four minima, six bits each. Their top two bits
    are the top bits of the other four scales and minima. Bytes 12 to 15 hold the low four bits of
    those.
    """
    scales, minima, rest = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    scale = torch.cat([scales & 0x3F, (rest & 0x0F) | ((scales >> 2) & 0x30)], dim=1)
    minimum = torch.cat([minima & 0x3F, (rest >> 4) | ((minima >> 2) & 0x30)], dim=1)
    return scale, minimum


def q3_k_scales(blocks: torch.Tensor) -> torch.Tensor:
    """Six-bit scales + 32 of the 16 sub-blocks of Q3_K: [num_blocks, 16] uint8."""
    low = nibbles(blocks[:, 96:104]).flatten(1)
    return low | (bits(blocks[:, 104:108], 4, 2).flatten(1) << 4)


def iq4_xs_scales(blocks: torch.Tensor) -> torch.Tensor:
    """Six-bit scales + 32 of the 8 sub-blocks of IQ4_XS: [num_blocks, 8] uint8."""
    low = nibbles(blocks[:, 4:8]).transpose(1, 2).flatten(1)
    high = bits(blocks[:, 2:4], 4, 2).transpose(1, 2).flatten(1)
    return low | (high << 4)


def _less(zero: int, start: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """(number - zero) times the float16 at `start`."""

    def scale(blocks: torch.Tensor, out: torch.Tensor) -> None:
        out.sub_(zero).mul_(half(blocks, start).float())

    return scale


def _with_minimum(blocks: torch.Tensor, out: torch.Tensor) -> None:
    # scale: f16 | minimum: f16
    out.mul_(half(blocks, 0).float()).add_(half(blocks, 2).float())


def _scale_q2_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    groups = out.view(-1, 16, 16)
    groups.mul_((half(blocks, 80).float() * (blocks[:, :16] & 15)).unsqueeze(-1))
    groups.sub_((half(blocks, 82).float() * (blocks[:, :16] >> 4)).unsqueeze(-1))


def _scale_q3_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    scale = half(blocks, 108).float() * (q3_k_scales(blocks).float() - 32)
    out.sub_(4).view(-1, 16, 16).mul_(scale.unsqueeze(-1))


def _scale_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    scale, minimum = k_scales(blocks)
    groups = out.view(-1, 8, 32)
    groups.mul_((half(blocks, 0).float() * scale).unsqueeze(-1))
    groups.sub_((half(blocks, 2).float() * minimum).unsqueeze(-1))


def _scale_q6_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    scale = half(blocks, 208).float() * blocks[:, 192:208].view(torch.int8)  # [n, 16]
    out.sub_(32).view(-1, 16, 16).mul_(scale.unsqueeze(-1))


def _look_up(values: tuple[int, ...], out: torch.Tensor) -> None:
    out.copy_(torch.tensor(values, dtype=torch.float32, device=out.device)[out.long()])


def _scale_iq4_nl(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _look_up(IQ4_VALUES, out)
    out.mul_(half(blocks, 0).float())


def _scale_iq4_xs(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _look_up(IQ4_VALUES, out)
    scale = half(blocks, 0).float() * (iq4_xs_scales(blocks).float() - 32)
    out.view(-1, 8, 32).mul_(scale.unsqueeze(-1))


def _scale_mxfp4(blocks: torch.Tensor, out: torch.Tensor) -> None:
    # a power of two with bias 128, because the numbers are doubled
    _look_up(E2M1_DOUBLED, out)
    exponent = blocks[:, :1].int()
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    out.mul_(bits.view(torch.float32))


def nvfp4_scales(blocks: torch.Tensor) -> torch.Tensor:
    """Scales of the four sub-blocks of NVFP4: unsigned e4m3, [num_blocks, 4] float32.

    They are halved, because the numbers are doubled. The NaN encoding gives zero.
    """
    packed = blocks[:, :4].int()
    exponent, mantissa = (packed >> 3) & 15, (packed & 7).float()
    normal = torch.ldexp(mantissa + 8, exponent - 11)
    scale = torch.where(exponent == 0, mantissa * 2.0**-10, normal)
    return torch.where(packed == 0x7F, 0.0, scale)


def _scale_nvfp4(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _look_up(E2M1_DOUBLED, out)
    out.view(-1, 4, 16).mul_(nvfp4_scales(blocks).unsqueeze(-1))


def _scale_q1_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.mul_(2).sub_(1).mul_(half(blocks, 0).float())


FORMATS: dict[str, BlockFormat] = {
    "Q8_0": BlockFormat(_q8_0_numbers, _less(128, 0)),
    "Q4_0": BlockFormat(_four_bits(2), _less(8, 0)),
    "Q4_1": BlockFormat(_four_bits(4), _with_minimum),
    "Q5_0": BlockFormat(_five_bits(2), _less(16, 0)),
    "Q5_1": BlockFormat(_five_bits(4), _with_minimum),
    "Q2_K": BlockFormat(_q2_k_numbers, _scale_q2_k),
    "Q3_K": BlockFormat(_q3_k_numbers, _scale_q3_k),
    "Q4_K": BlockFormat(_q4_k_numbers, _scale_k),
    "Q5_K": BlockFormat(_q5_k_numbers, _scale_k),
    "Q6_K": BlockFormat(_q6_k_numbers, _scale_q6_k),
    "IQ4_NL": BlockFormat(_four_bits(2), _scale_iq4_nl),
    "IQ4_XS": BlockFormat(_iq4_xs_numbers, _scale_iq4_xs),
    "MXFP4": BlockFormat(_four_bits(1), _scale_mxfp4),
    "NVFP4": BlockFormat(_nvfp4_numbers, _scale_nvfp4),
    "Q1_0": BlockFormat(_q1_0_numbers, _scale_q1_0),
    "TQ1_0": BlockFormat(_tq1_0_numbers, _less(1, 52)),
    "TQ2_0": BlockFormat(_tq2_0_numbers, _less(1, 64)),
    **{name: BlockFormat(partial(grid_numbers, name), partial(scale_grid, name)) for name in GRIDS},
}
