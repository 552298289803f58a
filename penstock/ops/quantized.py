"""Products with quantized weights in plain torch, and the memory layout of each kind.

Weights stay quantized: a tile of output rows is dequantized at a time, never a whole matrix.

- fp8: e4m3 numbers [out, in]. Scales: one per row [out], one for the matrix (scalar), or one per
  quantization block of 128 columns. Such a block spans 128 rows
  [ceil(out / 128), ceil(in / 128)], or one row [out, ceil(in / 128)] where fused parts do not end
  on block borders.
- int8: numbers [out, in]; one scale per row [out], or one for the matrix.
- w4: unsigned numbers of 4 or 8 bits, [out, in * bits / 8] uint8. Of two numbers in a byte, the
  first is in the low nibble. This equals the bytes of little-endian int32 words with the first
  number in the low bits. A weight is (number - zero) * scale. Scales are [out, in / group_size] in
  any float type; zeros have the same shape in uint8, or are None for half of the range. With
  `perm`, column i multiplies x[:, perm[i]]. perm may name a column more than once; then it has as
  many entries as the matrix has columns.
- fp4: e2m1 numbers, two per byte as in w4. Scales [out, in / group_size] are e8m0 bytes (uint8,
  quantization groups of 32) or e4m3 (quantization groups of 16). `global_scale` [out] float32
  multiplies a row.
- table: 4-bit indexes into a table of 16 floats, two per byte as in w4. Scales [out, groups]; all
  quantization groups have the same number of columns.

A backend with its own layout defines `prepare_w4(packed, scales, zeros, group_size, bits)`. It
returns the first three as that backend's `w4_linear` takes them. A layer calls it once, when all of
its weights are loaded. The same holds for `prepare_fp8(weight, weight_scale)`,
`prepare_fp4(packed, scales, global_scale, group_size)` and `prepare_table(packed)`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
BLOCK = 128  # rows and columns of a quantization block in fp8
TILE_NUMBERS = 1 << 21  # weights dequantized at a time

# e2m1: a sign bit, two exponent bits, one mantissa bit.
_FP4_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_VALUES = (*_FP4_POSITIVE, *(-value for value in _FP4_POSITIVE))


def fp8_linear(
    x: torch.Tensor,  # [n, in]
    weight: torch.Tensor,  # [out, in] float8_e4m3fn
    weight_scale: torch.Tensor,  # float32: scalar, [out], or by quantization block
    input_scale: torch.Tensor | None,  # scalar; None: dynamic, by token or by token and 128 columns
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """x W^T + bias with both operands in fp8 and float32 sums: [n, out]."""
    group = BLOCK if weight_scale.ndim == 2 else None
    rounded = _round_fp8(x, input_scale, group)

    def rows(start: int, end: int) -> torch.Tensor:
        return dequantize_fp8(weight, weight_scale, start, end)

    return _linear_by_tile(rounded, rows, len(weight), bias, x.dtype)


def int8_linear(
    x: torch.Tensor,  # [n, in]
    weight: torch.Tensor,  # [out, in] int8
    weight_scale: torch.Tensor,  # float32: [out], or scalar
    input_scale: torch.Tensor | None,  # scalar; None: dynamic, per token
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """x W^T + bias with both operands in int8: [n, out]."""
    x32 = x.float()
    if input_scale is None:
        input_scale = (x32.abs().amax(-1, keepdim=True) / 127.0).clamp_min(1e-12)
    rounded = (x32 / input_scale).round().clamp(-128, 127) * input_scale

    def rows(start: int, end: int) -> torch.Tensor:
        scale = weight_scale[start:end, None] if weight_scale.ndim else weight_scale
        return weight[start:end].float() * scale

    return _linear_by_tile(rounded, rows, len(weight), bias, x.dtype)


def w4_linear(
    x: torch.Tensor,  # [n, in], or the source of `perm`
    packed: torch.Tensor,  # [out, in * bits / 8] uint8
    scales: torch.Tensor,  # [out, in / group_size]
    zeros: torch.Tensor | None,  # [out, in / group_size] uint8
    group_size: int,
    bias: torch.Tensor | None,
    bits: int = 4,
    perm: torch.Tensor | None = None,  # [in] int64
) -> torch.Tensor:
    """x W^T + bias with 4-bit or 8-bit weights and unquantized activations: [n, out]."""
    x32 = (x if perm is None else x[:, perm]).float()

    def rows(start: int, end: int) -> torch.Tensor:
        own = None if zeros is None else zeros[start:end]
        return dequantize_w4(packed[start:end], scales[start:end], own, group_size, bits)

    return _linear_by_tile(x32, rows, len(packed), bias, x.dtype)


def w8_linear(
    x: torch.Tensor,
    packed: torch.Tensor,  # [out, in] uint8
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group_size: int,
    bias: torch.Tensor | None,
    perm: torch.Tensor | None = None,
) -> torch.Tensor:
    """`w4_linear` for 8 bits, which has its own kernels."""
    return w4_linear(x, packed, scales, zeros, group_size, bias, 8, perm)


def fp4_linear(
    x: torch.Tensor,  # [n, in]
    packed: torch.Tensor,  # [out, in / 2] uint8
    scales: torch.Tensor,  # [out, in / group_size] uint8 (e8m0) or float8_e4m3fn
    global_scale: torch.Tensor | None,  # [out] float32
    group_size: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """x W^T + bias with e2m1 weights and unquantized activations: [n, out]."""

    def rows(start: int, end: int) -> torch.Tensor:
        own = None if global_scale is None else global_scale[start:end]
        return dequantize_fp4(packed[start:end], scales[start:end], own, group_size)

    return _linear_by_tile(x.float(), rows, len(packed), bias, x.dtype)


def table_linear(
    x: torch.Tensor,  # [n, in]
    packed: torch.Tensor,  # [out, in / 2] uint8
    scales: torch.Tensor,  # [out, groups]
    values: torch.Tensor,  # [16] float32
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """x W^T + bias with weights from a table and unquantized activations: [n, out]."""

    def rows(start: int, end: int) -> torch.Tensor:
        return dequantize_table(packed[start:end], scales[start:end], values)

    return _linear_by_tile(x.float(), rows, len(packed), bias, x.dtype)


# -- dequantization


def dequantize_fp8(
    weight: torch.Tensor, scale: torch.Tensor, start: int = 0, end: int | None = None
) -> torch.Tensor:
    """Rows [start, end) of an fp8 matrix as float32."""
    out_features, in_features = weight.shape
    end = out_features if end is None else end
    floats = weight[start:end].float()
    if scale.ndim == 0:
        return floats * scale
    if scale.ndim == 1:
        return floats * scale[start:end, None]
    if len(scale) == out_features:
        by_row = scale[start:end]
    else:
        by_row = scale[torch.arange(start, end, device=scale.device) // BLOCK]
    for block in range(scale.shape[1]):
        floats[:, block * BLOCK : (block + 1) * BLOCK] *= by_row[:, block, None]
    return floats[:, :in_features]


def dequantize_w4(
    packed: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group_size: int,
    bits: int = 4,
) -> torch.Tensor:
    """[rows, in * bits / 8] -> [rows, in] float32."""
    numbers = unpack_nibbles(packed) if bits == 4 else packed
    grouped = numbers.float().view(len(packed), -1, group_size)
    zero: torch.Tensor | float = float(1 << (bits - 1))
    if zeros is not None:
        zero = zeros.float()[..., None]
    return ((grouped - zero) * scales.float()[..., None]).flatten(1)


def dequantize_fp4(
    packed: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor | None,
    group_size: int,
) -> torch.Tensor:
    """[rows, in / 2] -> [rows, in] float32."""
    values = torch.tensor(FP4_VALUES, device=packed.device)
    grouped = values[unpack_nibbles(packed).int()].view(len(packed), -1, group_size)
    floats = e8m0_to_float(scales) if scales.dtype == torch.uint8 else scales.float()
    if global_scale is not None:
        floats = floats * global_scale[:, None]
    return (grouped * floats[..., None]).flatten(1)


def dequantize_table(
    packed: torch.Tensor, scales: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """[rows, in / 2] -> [rows, in] float32."""
    rows, groups = scales.shape
    grouped = values.float()[unpack_nibbles(packed).int()].view(rows, groups, -1)
    return (grouped * scales.float()[..., None]).flatten(1)


def e8m0_to_float(scales: torch.Tensor) -> torch.Tensor:
    """Exponents of two with bias 127, as float32."""
    ones = torch.ones(scales.shape, device=scales.device)
    return torch.ldexp(ones, scales.int() - 127)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[rows, n] uint8 -> [rows, 2 n] uint8, the low nibble first."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def pack_nibbles(numbers: torch.Tensor) -> torch.Tensor:
    """[rows, 2 n] uint8 below 16 -> [rows, n] uint8, the first in the low nibble."""
    return numbers[..., ::2] | (numbers[..., 1::2] << 4)


# -- quantization


def quantize_fp8_by_row(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] -> e4m3 numbers, and scales [out] float32."""
    scale = _scale_of(weight.float().abs().amax(-1), FP8_MAX)
    return _to_fp8(weight.float() / scale[:, None]), scale


def quantize_fp8_whole(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] -> e4m3 numbers, and one scale, a float32 scalar."""
    scale = _scale_of(weight.abs().amax().float(), FP8_MAX)
    return _to_fp8(weight.float() / scale), scale


def quantize_fp8_by_block(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] -> e4m3 numbers, and scales [ceil(out / 128), ceil(in / 128)] float32."""
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scale = _scale_of(blocks.abs().amax((1, 3)), FP8_MAX)
    numbers = _to_fp8(blocks / scale[:, None, :, None]).view(padded.shape)
    return numbers[:rows, :columns].contiguous(), scale


def quantize_int8_by_row(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] -> int8 numbers, and scales [out] float32."""
    floats = weight.float()
    scale = _scale_of(floats.abs().amax(-1), 127.0)
    return (floats / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8), scale


def _scale_of(largest: torch.Tensor, limit: float) -> torch.Tensor:
    return (largest / limit).clamp_min(1e-12)


def _to_fp8(floats: torch.Tensor) -> torch.Tensor:
    return floats.clamp_(-FP8_MAX, FP8_MAX).to(FP8)


def _round_fp8(
    x: torch.Tensor, scale: torch.Tensor | None, group: int | None = None
) -> torch.Tensor:
    """x [n, in] rounded to fp8 and back to float32.

    Without a scale, each token or each quantization group of it gets a dynamic one.
    """
    x32 = x.float()
    if scale is not None:
        return _to_fp8(x32 / scale).float() * scale
    if group is not None and x32.shape[1] > group:
        columns = x32.shape[1]
        grouped = F.pad(x32, (0, -columns % group)).view(-1, group)
        return _round_fp8(grouped, None).view(len(x), -1)[:, :columns]
    own = _scale_of(x32.abs().amax(-1, keepdim=True), FP8_MAX)
    return _to_fp8(x32 / own).float() * own


def _linear_by_tile(
    x: torch.Tensor,  # [n, in] float32
    rows: Callable[[int, int], torch.Tensor],  # (start, end) -> [end - start, in] float32
    out_features: int,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    out = torch.empty(len(x), out_features, dtype=dtype, device=x.device)
    step = max(TILE_NUMBERS // x.shape[1], 1)
    for start in range(0, out_features, step):
        end = min(start + step, out_features)
        own = None if bias is None else bias[start:end].float()
        out[:, start:end] = F.linear(x, rows(start, end), own)
    return out
