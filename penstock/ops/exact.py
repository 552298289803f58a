"""exp and log in float32 with the same bits in every implementation.

Math libraries differ in the last bit, which can change a draw or a cutoff. These functions use only
additions and multiplications, each rounded separately (never fused), in the order written here.
`ops/cpu/csrc/sampling.hpp` computes the same in C++. Both are accurate to two units in the last
place. The coefficients are those of the Cephes library.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_COEFFICIENTS = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
EXP_COEFFICIENTS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # their sum is ln 2
LOG2_E = 1.44269504088896341
SQRT_HALF_BITS = 0x3F3504F3
MANTISSA_BITS = 23
LEAST_EXPONENT = -80.0


def log(x: Tensor) -> Tensor:
    """The log of positive, normal float32 numbers."""
    bits = x.view(torch.int32)
    exponent = (bits - SQRT_HALF_BITS) >> MANTISSA_BITS
    fraction = (bits - (exponent << MANTISSA_BITS)).view(torch.float32) - 1.0  # sqrt(1/2) - 1 ...
    power = exponent.to(torch.float32)
    square = fraction * fraction
    polynomial = _horner(LOG_COEFFICIENTS, fraction)
    rest = polynomial * fraction * square + power * LN2_LOW - square * 0.5
    return (fraction + rest) + power * LN2_HIGH


def exp(x: Tensor) -> Tensor:
    """The exp of float32 numbers up to 80. Below -80 it returns exp(-80)."""
    x = x.clamp(min=LEAST_EXPONENT)
    power = (x * LOG2_E).round()
    rest = (x - power * LN2_HIGH) - power * LN2_LOW
    value = _horner(EXP_COEFFICIENTS, rest) * (rest * rest) + (rest + 1.0)
    bits = value.view(torch.int32) + (power.to(torch.int32) << MANTISSA_BITS)
    return bits.view(torch.float32)


def _horner(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    result = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        result = (result + coefficient) * x
    return result + coefficients[-1]
