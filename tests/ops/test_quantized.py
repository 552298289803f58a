"""Products with quantized weights, each against its weights as floats, over odd shapes."""

from __future__ import annotations

import pytest
import torch

from penstock.ops import quantized as ops


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


SHAPES = [
    (1, 8, 32),
    (3, 200, 300),
    (5, 1030, 4096),
]  # rows of x, outputs, inputs: the last in tiles


def assert_near(output: torch.Tensor, expected: torch.Tensor, error: float) -> None:
    assert output.shape == expected.shape
    assert float((output - expected).std() / expected.std()) < error


@pytest.mark.parametrize(("n", "out", "size"), SHAPES)
@pytest.mark.parametrize("by", ["whole", "row", "block", "block of a row"])
def test_fp8(n: int, out: int, size: int, by: str) -> None:
    x, weight, bias = numbers(n, size), numbers(out, size, seed=1), numbers(out, seed=2)
    quantize = {"whole": ops.quantize_fp8_whole, "row": ops.quantize_fp8_by_row}
    values, scale = quantize.get(by, ops.quantize_fp8_by_block)(weight)
    each = scale[:, None] if by == "row" else scale
    if by.startswith("block"):
        each = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:out, :size]
    if by == "block of a row":
        scale = scale.repeat_interleave(128, 0)[:out].contiguous()
    floats = values.float() * each
    torch.testing.assert_close(ops.dequantize_fp8(values, scale), floats)
    assert_near(floats, weight, 0.04)
    output = ops.fp8_linear(x, values, scale, None, bias)
    assert_near(output, x @ floats.t() + bias, 0.04)


def test_fp8_with_a_scale_of_the_checkpoint_saturates() -> None:
    weight, scale = ops.quantize_fp8_by_row(torch.eye(4))
    x = torch.tensor([[1.0, 2.0, 1000.0, -1000.0]])
    output = ops.fp8_linear(x, weight, scale, torch.tensor(0.5), None)
    torch.testing.assert_close(output, torch.tensor([[1.0, 2.0, 224.0, -224.0]]))


@pytest.mark.parametrize(("n", "out", "size"), SHAPES)
def test_int8(n: int, out: int, size: int) -> None:
    x, weight, bias = numbers(n, size), numbers(out, size, seed=1), numbers(out, seed=2)
    values, scale = ops.quantize_int8_by_row(weight)
    expected = x @ (values.float() * scale[:, None]).t() + bias
    assert_near(ops.int8_linear(x, values, scale, None, bias), expected, 0.02)
    assert_near(ops.int8_linear(x, values, scale, torch.tensor(4 / 127), bias), expected, 0.02)
    one = ops.int8_linear(x, values, torch.tensor(0.25), None, None)
    assert_near(one, x @ (values.float() * 0.25).t(), 0.02)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("n", "out", "size", "group"), [(1, 8, 32, 32), (3, 70, 96, 16), (5, 1030, 4096, 128)]
)
@pytest.mark.parametrize("has_zeros", [False, True])
def test_w4(n: int, out: int, size: int, group: int, bits: int, has_zeros: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(0, 1 << bits, (out, size), generator=generator, dtype=torch.uint8)
    packed = ops.pack_nibbles(values) if bits == 4 else values
    scales = torch.rand(out, size // group, generator=generator) + 0.1
    zeros = None
    if has_zeros:
        zeros = torch.randint(0, 1 << bits, scales.shape, generator=generator, dtype=torch.uint8)
    each = (1 << (bits - 1)) if zeros is None else zeros.repeat_interleave(group, 1).float()
    floats = (values.float() - each) * scales.repeat_interleave(group, 1)
    x, bias = numbers(n, size), numbers(out)
    output = ops.w4_linear(x, packed, scales, zeros, group, bias, bits)
    assert_near(output, x @ floats.t() + bias, 1e-5)
    perm = torch.randint(0, 50, (size,), generator=generator)  # columns of a shorter x, repeated
    x = numbers(n, 50)
    output = ops.w4_linear(x, packed, scales, zeros, group, None, bits, perm)
    assert_near(output, x[:, perm] @ floats.t(), 1e-5)


def test_words_of_32_bits_have_the_same_bytes() -> None:
    values = torch.arange(16, dtype=torch.uint8)[None]
    words = ops.pack_nibbles(values).view(torch.int32)
    assert words.view(torch.uint32).tolist() == [[0x76543210, 0xFEDCBA98]]
    assert torch.equal(ops.unpack_nibbles(words.view(torch.uint8)), values)


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_fp4(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (70, 192), generator=generator, dtype=torch.uint8)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    group = 32 if kind == "mxfp4" else 16
    whole = None
    if kind == "mxfp4":
        scales = torch.randint(120, 130, (70, 6), generator=generator, dtype=torch.uint8)
        each = 2.0 ** (scales.float() - 127)
    else:
        scales = (torch.rand(70, 12, generator=generator) + 0.1).to(torch.float8_e4m3fn)
        whole = torch.rand(70, generator=generator)
        each = scales.float() * whole[:, None]
    floats = values[codes.int()] * each.repeat_interleave(group, 1)
    x = numbers(4, 192)
    output = ops.fp4_linear(x, ops.pack_nibbles(codes), scales, whole, group, None)
    assert_near(output, x @ floats.t(), 1e-5)


def test_exponents_reach_from_end_to_end() -> None:
    ends = torch.tensor([0, 127, 254], dtype=torch.uint8)
    assert ops.e8m0_to_float(ends).tolist() == [2.0**-127, 1.0, 2.0**127]


def test_a_matrix_is_never_floats_as_a_whole() -> None:
    size = 4096
    packed = torch.zeros(size, size // 2, dtype=torch.uint8)
    scales = torch.ones(size, size // 128)
    with torch.profiler.profile(profile_memory=True) as profile:
        ops.w4_linear(torch.ones(1, size), packed, scales, None, 128, None)
    results = profile.profiler.kineto_results
    held = peak = 0
    events = [event for event in results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert 0 < peak < size * size * 4 * 0.6
