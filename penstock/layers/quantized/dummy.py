"""Random weights in any scheme, generated on the device, for benchmarks."""

from __future__ import annotations

import math

import torch
from torch import nn

from penstock.layers.matrix import MatrixLayer
from penstock.layers.quantization import Shard
from penstock.layers.quantized.bitsandbytes import LlmInt8Scheme, TableScheme
from penstock.layers.quantized.experts import QuantizedExperts
from penstock.layers.quantized.linear import QuantizedMethod
from penstock.layers.quantized.packed import AwqScheme, GptqScheme, PackedScheme
from penstock.layers.quantized.schemes import (
    Fp4Scheme,
    Fp8Scheme,
    Int8Scheme,
    OnlineScheme,
    Scheme,
)
from penstock.layers.quantized.weights import (
    Fp4Weight,
    QuantizedWeight,
    TableWeight,
    W4Weight,
)

_UNIFORM_DEVIATION = {4: 4.61, 8: 73.9}  # standard deviation of a uniform number, by bits
_FP4_DEVIATION = 2.9
_TABLE_DEVIATION = 0.61  # standard deviation of a table of equal steps from -1 to 1
_TABLE_COLUMNS = 64


def fill_quantized(module: nn.Module, deviation: float, seed: int) -> int:
    """Generate the weights of a layer or of experts with a scheme. Returns the number of seeds."""
    if isinstance(module, QuantizedExperts):
        return _fill_experts(module, deviation, seed)
    if not isinstance(module, MatrixLayer) or not isinstance(module.method, QuantizedMethod):
        return 0
    method, build = module.method, module.build
    for index, (part, rows) in enumerate(module.part_rows.items()):
        generator = torch.Generator(build.device).manual_seed(seed + index)
        weight = dummy_weight(
            method.scheme, rows, module.in_features, deviation, build.dtype, generator
        )
        method.add(module, part, weight)
    return len(module.part_rows)


def _fill_experts(module: QuantizedExperts, deviation: float, seed: int) -> int:
    hidden, size, build = module.config.hidden_size, module.size, module.build
    names = ("gate_proj", "up_proj", "down_proj")
    for expert in range(len(module.config.own_experts)):
        for index, name in enumerate(names):
            number = seed + expert * len(names) + index
            generator = torch.Generator(build.device).manual_seed(number)
            rows, columns = (hidden, size) if name == "down_proj" else (size, hidden)
            weight = dummy_weight(module.scheme, rows, columns, deviation, build.dtype, generator)
            module.put(expert, name, weight)
    return len(module.config.own_experts) * len(names)


def dummy_weight(
    scheme: Scheme,
    rows: int,
    columns: int,
    deviation: float,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> QuantizedWeight:
    """[rows, columns] with about that standard deviation, on the generator's device."""
    device = generator.device
    if isinstance(scheme, Fp8Scheme | Int8Scheme | LlmInt8Scheme | OnlineScheme):
        made = _online(scheme)
        floats = torch.empty(rows, columns, dtype=dtype, device=device)
        floats.normal_(0.0, deviation, generator=generator)
        shard = Shard((rows, columns), 0, rows, 0, columns)
        return made.convert({"weight": floats}, shard)
    if isinstance(scheme, Fp4Scheme):
        packed = _bytes(rows, columns // 2, generator)
        shape = (rows, columns // scheme.group_size)
        if scheme.kind == "mxfp4":
            exponents = torch.full(shape, 119, dtype=torch.uint8, device=device)
            return Fp4Weight(packed, exponents, None, scheme.group_size)
        scales = torch.ones(shape, device=device).to(torch.float8_e4m3fn)
        whole = torch.full((rows,), deviation / _FP4_DEVIATION, device=device)
        return Fp4Weight(packed, scales, whole, scheme.group_size)
    if isinstance(scheme, TableScheme):
        shape = (rows, columns // math.gcd(columns, _TABLE_COLUMNS))
        scales = torch.full(shape, deviation / _TABLE_DEVIATION, device=device)
        table = torch.linspace(-1, 1, 16, device=device)
        return TableWeight(_bytes(rows, columns // 2, generator), scales, table)
    assert isinstance(scheme, GptqScheme | AwqScheme | PackedScheme)
    group = columns if scheme.group_size == -1 else scheme.group_size
    packed = _bytes(rows, columns * scheme.bits // 8, generator)
    scale = deviation / _UNIFORM_DEVIATION[scheme.bits]
    scales = torch.full((rows, columns // group), scale, dtype=dtype, device=device)
    has_zeros = isinstance(scheme, AwqScheme | PackedScheme) and scheme.has_zeros
    zeros = None
    if has_zeros:
        zeros = torch.full_like(scales, 1 << (scheme.bits - 1), dtype=torch.uint8)
    return W4Weight(packed, scales, zeros, group, scheme.bits)


def _online(scheme: Fp8Scheme | Int8Scheme | LlmInt8Scheme | OnlineScheme) -> OnlineScheme:
    """The online scheme for the same kind of weights. Activations are dynamic."""
    if isinstance(scheme, Fp8Scheme):
        return OnlineScheme("fp8", scheme.granularity)
    if isinstance(scheme, LlmInt8Scheme):
        return OnlineScheme("int8_weight_only")
    if isinstance(scheme, Int8Scheme):
        return OnlineScheme("int8_weight_only" if scheme.activations == "none" else "int8")
    return scheme


def _bytes(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(
        0, 256, (rows, columns), dtype=torch.uint8, device=generator.device, generator=generator
    )
