"""Dequantizes the GGUF types IQ1, IQ2 and IQ3, in plain torch.

Eight neighbouring columns are an *octet*. An octet is an index into the format's table (in IQ3, two
indexes for four columns each), with a sign per column. In IQ1, a shift of the whole octet replaces
the signs. A quantization block of 256 columns has a float16, and an integer s for each sub-block.
The scale of a sub-block is (2 s + 1) times the float16 times a factor of the type. The tables come
from the gguf package, when a file needs them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from penstock.ops.gguf_fields import bits_in_order, half, view_as
from penstock.protocol.errors import ModelError

_EACH_128 = int.from_bytes(b"\x80" * 8, "little", signed=True)


class Codes(NamedTuple):
    """The fields of some quantization blocks."""

    indices: torch.Tensor  # [num_blocks, 32 or 64]: one or two per octet
    signs: torch.Tensor  # [num_blocks, 32]: one bit per column, 1 is negative
    scale: torch.Tensor  # [num_blocks, 1] float16
    steps: torch.Tensor  # [num_blocks, sub-blocks]: s


class GridFormat(NamedTuple):
    """One type of quantization block."""

    codes: Callable[[torch.Tensor], Codes]
    factor: float
    group: int  # columns of a sub-block
    each: int = 8  # columns per table entry
    shifts: bool = False  # signs apply to a shift by 1 / 8; all of an octet are equal


@functools.cache
def table(type_name: str) -> torch.Tensor:
    """The format's table: [entries, 8 or 4] uint8.

    For IQ1, whose numbers are -1, 0 and 1, it holds 8 * number + 129. Raises ModelError if the gguf
    package is missing.
    """
    try:
        from gguf import quants  # imported here: other types do not need it

        source = getattr(quants, type_name)
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"{type_name} needs a table of the gguf package, which is missing or too old: "
            "pip install 'gguf>=0.17' (or 'penstock[iq]'), or choose a file of another type"
        ) from error
    source.init_grid()
    numbers = torch.from_numpy(source.grid).view(source.grid_shape)
    if GRIDS[type_name].shifts:
        numbers = numbers * 8 + 129
    return numbers.to(torch.uint8)


@functools.cache
def _sign_bytes() -> torch.Tensor:
    """For each byte, its bits as eight bytes of one number: [256] int64."""
    every = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    return bits_in_order(every, 8, 1).view(torch.int64).flatten()


def grid_numbers(type_name: str, blocks: torch.Tensor) -> torch.Tensor:
    """The unscaled numbers + 128: [num_blocks, 256] uint8. For IQ1, eight times the number."""
    own = GRIDS[type_name]
    codes = own.codes(blocks)
    # Eight numbers at once, one per byte. No byte carries into the next.
    dtype = torch.int64 if own.each == 8 else torch.int32
    indices, signs = codes.indices.flatten().int(), codes.signs.flatten().int()
    found = table(type_name).to(blocks.device).view(dtype).flatten()[indices].view(torch.int64)
    negative = _sign_bytes().to(blocks.device)[signs]  # 1 in negative bytes
    if own.shifts:
        numbers = found - 2 * negative
    else:
        numbers = ((found ^ (negative * 255)) + negative) ^ _EACH_128
    return numbers.view(torch.uint8).view(len(blocks), 256)


def scale_grid(type_name: str, blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Scale numbers [num_blocks, 256] float32, in place."""
    own = GRIDS[type_name]
    codes = own.codes(blocks)
    scale = codes.scale.float() * (2 * codes.steps + 1) * own.factor
    out.sub_(128).view(-1, 256 // own.group, own.group).mul_(scale.unsqueeze(-1))


def _eight_signs(seven: torch.Tensor) -> torch.Tensor:
    """Add the eighth sign on top. It makes the number of negative signs even."""
    parity = seven ^ (seven >> 4)
    parity = parity ^ (parity >> 2)
    parity = (parity ^ (parity >> 1)) & 1
    return seven | (parity << 7)


def _steps(packed: torch.Tensor) -> torch.Tensor:
    """Two 4-bit values from each byte."""
    return bits_in_order(packed, 2, 4)


def _iq2_xxs(blocks: torch.Tensor) -> Codes:
    # f16 | 8 x (4 indices, 4 x 7 signs and s: 4 bits)
    fields = blocks[:, 2:].view(-1, 8, 8)
    signs = view_as(fields[:, :, 4:], torch.int32).flatten(1)
    return Codes(
        fields[:, :, :4].flatten(1),
        _eight_signs(bits_in_order(signs, 4, 7)),
        half(blocks, 0),
        (signs >> 28) & 15,
    )


def _iq2_xs(blocks: torch.Tensor) -> Codes:
    # f16 | 32 x (place: 9 bits, 7 signs) | 16 x s: 4 bits
    fields = view_as(blocks[:, 2:66], torch.int16)
    signs = _eight_signs((fields >> 9) & 127)
    return Codes(fields & 511, signs, half(blocks, 0), _steps(blocks[:, 66:]))


def _iq2_s(blocks: torch.Tensor) -> Codes:
    # f16 | 32 x low 8 bits of indices | 32 x 8 signs | 32 x their high 2 bits | 16 x s: 4 bits
    high = bits_in_order(blocks[:, 66:74], 4, 2).int()
    indices = blocks[:, 2:34] | (high << 8)
    return Codes(indices, blocks[:, 34:66], half(blocks, 0), _steps(blocks[:, 74:]))


def _iq3_xxs(blocks: torch.Tensor) -> Codes:
    # f16 | 64 indices | 8 x (4 x 7 signs, s: 4 bits)
    signs = view_as(blocks[:, 66:], torch.int32)
    return Codes(
        blocks[:, 2:66],
        _eight_signs(bits_in_order(signs, 4, 7)),
        half(blocks, 0),
        (signs >> 28) & 15,
    )


def _iq3_s(blocks: torch.Tensor) -> Codes:
    # f16 | 64 x low 8 bits of indices | 64 x their high bit | 32 x 8 signs | 8 x s: 4 bits
    high = bits_in_order(blocks[:, 66:74], 8, 1).int()
    indices = blocks[:, 2:66] | (high << 8)
    return Codes(indices, blocks[:, 74:106], half(blocks, 0), _steps(blocks[:, 106:]))


def _iq1_s(blocks: torch.Tensor) -> Codes:
    # f16 | 32 x low 8 bits of indices | 8 x (4 x their high 3 bits, s: 3 bits, sign of the shift)
    fields = view_as(blocks[:, 34:], torch.int16).int()
    indices = blocks[:, 2:34] | (bits_in_order(fields, 4, 3) << 8)
    negative = ((fields >> 15) & 1).repeat_interleave(4, dim=1)
    return Codes(indices, negative * 255, half(blocks, 0), (fields >> 12) & 7)


def _iq1_m(blocks: torch.Tensor) -> Codes:
    # 32 x low 8 bits of indices | 32 x (their high 3 bits, sign of the shift)
    # | 4 x (4 x s: 3 bits, and 4 bits of the f16)
    high = bits_in_order(blocks[:, 32:48], 2, 4).int()
    fields = view_as(blocks[:, 48:], torch.int16).int()
    quarters = ((fields >> 12) & 15) << torch.arange(0, 16, 4, device=blocks.device)
    scale = quarters.sum(1, keepdim=True).to(torch.int16).view(torch.float16)
    indices = blocks[:, :32] | ((high & 7) << 8)
    return Codes(indices, (high >> 3) * 255, scale, bits_in_order(fields, 4, 3))


GRIDS: dict[str, GridFormat] = {
    "IQ2_XXS": GridFormat(_iq2_xxs, 0.125, 32),
    "IQ2_XS": GridFormat(_iq2_xs, 0.125, 16),
    "IQ2_S": GridFormat(_iq2_s, 0.125, 16),
    "IQ3_XXS": GridFormat(_iq3_xxs, 0.25, 32, each=4),
    "IQ3_S": GridFormat(_iq3_s, 1.0, 32, each=4),
    "IQ1_S": GridFormat(_iq1_s, 0.125, 32, shifts=True),
    "IQ1_M": GridFormat(_iq1_m, 0.125, 16, shifts=True),
}
