"""Triton's products with quantized weights against the reference, over shapes and group sizes."""

from __future__ import annotations

import pytest
import torch
from expert_cases import experts_case

from penstock.ops import quantized as plain
from penstock.ops import reference

pytest.importorskip("triton", reason="needs Triton")

from penstock.ops.triton import (
    fp8,
    fp8_experts,
    packed_experts,
    packed_layout,
    slabs,
    w4_row,
)
from penstock.ops.triton import packed as packed_ops
from penstock.ops.triton.tuning import Launch
from penstock.ops.triton.tuning_quantized import Fp8Plan, TilePlan

ON_GPU = torch.cuda.is_available()
QUANTIZE = fp8.quantize
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if ON_GPU else [torch.float32]


@pytest.fixture(autouse=True)
def _rounding_that_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter rounds to fp8 wrongly: ties away from even, carries not at all."""
    if not ON_GPU:
        for module in (fp8, fp8_experts):
            monkeypatch.setattr(module, "quantize", round_in_torch)


def round_in_torch(
    x: torch.Tensor, static: torch.Tensor | None, grouped: bool, num_arrived: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    arrived = torch.zeros(num_arrived, dtype=torch.int32, device=x.device)
    if static is not None:
        return _divide(x, static), static.expand(len(x)).contiguous(), arrived
    size = 128 if grouped else x.shape[1]
    columns = [x[:, start : start + size].float() for start in range(0, x.shape[1], size)]
    scales = [(own.abs().amax(1) / 448).clamp_min(1e-12) for own in columns]
    rounded = [_divide(own, scale[:, None]) for own, scale in zip(columns, scales, strict=True)]
    numbers = torch.cat([own.view(torch.uint8) for own in rounded], 1).view(torch.float8_e4m3fn)
    return numbers, torch.stack(scales) if grouped else scales[0], arrived


def _divide(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    """Relative to the whole result; a NaN is never close."""
    error = (ours.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-30)
    assert ours.shape == theirs.shape
    assert float(error) < tolerance


def tolerance_of(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 5e-3


# -- fp8


def fp8_weight(kind: str, out: int, size: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    weight = torch.randn(out, size, device=device) * torch.rand(out, 1, device=device)
    if kind == "row":
        return plain.quantize_fp8_by_row(weight)
    if kind == "whole":
        return plain.quantize_fp8_whole(weight)
    numbers, scale = plain.quantize_fp8_by_block(weight)
    if kind == "block of one row":
        scale = scale.repeat_interleave(128, dim=0)[:out].contiguous()
    return numbers, scale


KINDS = ["row", "whole", "block", "block of one row"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("out", "size"), [(48, 64), (130, 272)])
def test_one_row_with_fp8_weights_is_the_product_without_rounding(
    device: torch.device, kind: str, dtype: torch.dtype, out: int, size: int
) -> None:
    weight, scale = fp8.prepare_fp8(*fp8_weight(kind, out, size, device))
    x = torch.randn(1, size, device=device).to(dtype)
    bias = torch.randn(out, device=device).to(dtype)
    expected = x.float() @ plain.dequantize_fp8(weight, scale).T + bias.float()
    close(fp8.fp8_linear(x, weight, scale, None, bias), expected, tolerance_of(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "static"), [(2, False), (19, True), (70, False)])
def test_rows_with_fp8_weights_are_the_references(
    device: torch.device, kind: str, dtype: torch.dtype, n: int, static: bool
) -> None:
    out, size = 208, 272
    weight, scale = fp8.prepare_fp8(*fp8_weight(kind, out, size, device))
    x = (torch.randn(n, size, device=device) * torch.rand(n, 1, device=device)).to(dtype)
    input_scale = torch.tensor(0.004, device=device) if static else None  # the largest saturate
    bias = torch.randn(out, device=device).to(dtype) if n > 2 else None
    ours = fp8.fp8_linear(x, weight, scale, input_scale, bias)
    # The tensor cores keep fewer bits of a sum of fp8 products than float32 has.
    tolerance = max(tolerance_of(dtype), 2e-3 if ON_GPU else 0.0)
    close(ours, plain.fp8_linear(x, weight, scale, input_scale, bias), tolerance)


@pytest.mark.parametrize("kind", ["row", "block"])
@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("swap", [False, True])
def test_parts_of_the_columns_add_up(
    device: torch.device, kind: str, splits: int, swap: bool
) -> None:
    weight, scale = fp8.prepare_fp8(*fp8_weight(kind, 144, 720, device))
    x = torch.randn(21, 720, device=device)
    plan = Fp8Plan(64, 16, 128, splits, swap, True, Launch(4, 2))
    ours = fp8.run_tiles(x, weight, scale, None, None, plan)
    close(ours, plain.fp8_linear(x, weight, scale, None, None), 2e-3)


@pytest.mark.parametrize("mode", ["rows", "groups", "static"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_to_fp8_is_torchs(device: torch.device, mode: str, dtype: torch.dtype) -> None:
    x = torch.randn(5, 400, device=device).to(dtype)
    static = torch.tensor(0.007, device=device) if mode == "static" else None
    numbers, scales, arrived = QUANTIZE(x, static, mode == "groups", 7)
    expected, expected_scales, _ = round_in_torch(x, static, mode == "groups")
    torch.testing.assert_close(scales, expected_scales)
    assert (arrived == 0).all()
    # A step of e4m3 on a GPU, where a quotient may fall on the other side of a tie; in the
    # interpreter a factor of two, see above. Next to zero steps are 2^-9.
    limit = (0.07 if ON_GPU else 0.51) * expected.float().abs() + 2**-9
    assert ((numbers.float() - expected.float()).abs() <= limit).all()
    share = (numbers.float() != expected.float()).float().mean()
    assert float(share) < (0.002 if ON_GPU else 0.2)


def test_a_row_of_zeros_and_one_that_saturates(device: torch.device) -> None:
    weight, scale = fp8.prepare_fp8(*fp8_weight("row", 64, 64, device))
    x = torch.zeros(2, 64, device=device)
    x[1] = 1e30
    rounded, scales, _ = fp8.quantize(x, None, False)
    assert (rounded[0].float() == 0).all()
    assert (rounded[1].float() == 448).all()
    assert scales.isfinite().all()
    clipped, _, _ = fp8.quantize(x, torch.tensor(1.0, device=device), False)
    assert (clipped[1].float() == 448).all()
    assert (fp8.fp8_linear(x, weight, scale, None, None)[0] == 0).all()


def test_sizes_that_the_copy_engine_cannot_fetch_go_to_the_reference(device: torch.device) -> None:
    weight, scale = fp8.prepare_fp8(*fp8_weight("row", 10, 70, device))
    x = torch.randn(3, 70, device=device)
    ours = fp8.fp8_linear(x, weight, scale, None, None)
    close(ours, plain.fp8_linear(x, weight, scale, None, None), 1e-6)


# -- 4 bits


def w4_weight(
    out: int, size: int, group: int, zeros: bool, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    numbers = torch.randint(0, 16, (out, size), dtype=torch.uint8, device=device)
    shape = (out, size // group)
    scales = (torch.rand(shape, device=device) + 0.1).to(dtype)
    zero = torch.randint(0, 16, shape, dtype=torch.uint8, device=device) if zeros else None
    return plain.pack_nibbles(numbers), scales, zero


def fp4_weight(
    out: int, size: int, group: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Groups of 32 as MXFP4 has them, others as NVFP4."""
    packed = torch.randint(0, 256, (out, size // 2), dtype=torch.uint8, device=device)
    shape = (out, size // group)
    if group == 32:
        return packed, torch.randint(120, 130, shape, dtype=torch.uint8, device=device), None
    scales = (torch.rand(shape, device=device) * 4 + 0.1).to(torch.float8_e4m3fn)
    return packed, scales, torch.rand(out, device=device) + 0.5


GROUPS = [(128, 256), (32, 160), (64, 64), (200, 200)]
if ON_GPU:  # the interpreter takes its time
    GROUPS += [(64, 192), (16, 48), (256, 512)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("group", "size"), GROUPS)
@pytest.mark.parametrize("n", [1, 5, 130])  # one row (float32: a tile), tiles, floats for cuBLAS
def test_rows_with_weights_of_4_bits_are_the_references(
    device: torch.device, group: int, size: int, zeros: bool, dtype: torch.dtype, n: int
) -> None:
    out = 72 if ON_GPU else 20
    packed, scales, zero = w4_weight(out, size, group, zeros, dtype, device)
    x = torch.randn(n, size, device=device).to(dtype)
    bias = torch.randn(out, device=device).to(dtype)
    expected = plain.w4_linear(x.float(), packed, scales, zero, group, bias.float())
    prepared = packed_layout.prepare_w4(packed, scales, zero, group)
    assert prepared[0].dtype == torch.int16
    close(packed_ops.w4_linear(x, *prepared, group, bias), expected, tolerance_of(dtype))


@pytest.mark.parametrize("warps", [1, 4])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("group", "size"), [*GROUPS, (128, 4096), (128, 4224), (16, 144)])
def test_one_row_with_weights_of_4_bits_is_the_references(
    device: torch.device, group: int, size: int, zeros: bool, warps: int
) -> None:
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    packed, scales, zero = w4_weight(20, size, group, zeros, dtype, device)
    x = (torch.randn(1, size, device=device) + 1).to(dtype)
    bias = torch.randn(20, device=device).to(dtype)
    expected = plain.w4_linear(x.float(), packed, scales, zero, group, bias.float())
    weight = packed_layout.Packed(*packed_layout.prepare_w4(packed, scales, zero, group), group)
    close(w4_row.one_row(x, weight, bias, warps), expected, tolerance_of(dtype))


@pytest.mark.parametrize(("group", "size"), [(32, 1184), (16, 144)])
def test_one_row_with_weights_of_4_floating_point_bits_is_the_references(
    device: torch.device, group: int, size: int
) -> None:
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    packed, scales, global_scale = fp4_weight(20, size, group, device)
    x = torch.randn(1, size, device=device).to(dtype)
    expected = plain.fp4_linear(x.float(), packed, scales, global_scale, group, None)
    numbers = packed_layout.prepare_fp4(packed, scales, global_scale, group)
    weight = packed_layout.Packed(numbers[0], numbers[1], None, group, "fp4", numbers[2])
    close(w4_row.one_row(x, weight, None), expected, tolerance_of(dtype))


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("zeros", [False, True])
def test_parts_of_the_columns_of_4_bits_add_up(
    device: torch.device, splits: int, zeros: bool
) -> None:
    packed, scales, zero = w4_weight(100, 640, 32, zeros, torch.float32, device)
    x = torch.randn(20, 640, device=device)
    prepared = packed_layout.prepare_w4(packed, scales, zero, 32)
    plan = TilePlan(64, 16, splits, Launch(4, 2))
    ours = packed_ops.run_tiles(x, packed_layout.Packed(*prepared, 32), None, plan)
    close(ours, plain.w4_linear(x, packed, scales, zero, 32, None), 1e-5)


@pytest.mark.parametrize("n", [1, 3])
def test_columns_in_another_order(device: torch.device, n: int) -> None:
    packed, scales, _ = w4_weight(40, 128, 32, False, torch.float32, device)
    perm = torch.randperm(128, device=device)
    x = torch.randn(n, 128, device=device)
    ours = packed_ops.w4_linear(
        x, *packed_layout.prepare_w4(packed, scales, None, 32), 32, None, perm=perm
    )
    close(ours, plain.w4_linear(x, packed, scales, None, 32, None, perm=perm), 1e-4)


@pytest.mark.parametrize(("group", "bits"), [(32, 8), (24, 4)])
def test_what_the_layout_does_not_take_stays_as_it_is(
    device: torch.device, group: int, bits: int
) -> None:
    packed = torch.randint(0, 256, (24, 96 * bits // 8), dtype=torch.uint8, device=device)
    scales = torch.rand(24, 96 // group, device=device)
    prepared = packed_layout.prepare_w4(packed, scales, None, group, bits)
    assert prepared[0] is packed
    x = torch.randn(3, 96, device=device)
    ours = packed_ops.w4_linear(x, *prepared, group, None, bits)
    close(ours, plain.w4_linear(x, packed, scales, None, group, None, bits), 1e-6)


def test_slabs_of_a_large_matrix_are_the_whole(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slabs, "SLAB", 128 * 30)
    monkeypatch.setattr(packed_layout, "SLAB", 128 * 3)
    packed, scales, zero = w4_weight(72, 128, 32, True, torch.float32, device)
    x, bias = torch.randn(140, 128, device=device), torch.randn(72, device=device)
    ours = packed_ops.w4_linear(x, *packed_layout.prepare_w4(packed, scales, zero, 32), 32, bias)
    close(ours, plain.w4_linear(x, packed, scales, zero, 32, bias), 1e-5)


# -- 4 floating-point bits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "size"), [(32, 160), (16, 144), (32, 32)])
@pytest.mark.parametrize("n", [1, 5, 130])
def test_rows_with_weights_of_4_floating_point_bits_are_the_references(
    device: torch.device, group: int, size: int, dtype: torch.dtype, n: int
) -> None:
    packed, scales, global_scale = fp4_weight(72 if ON_GPU else 20, size, group, device)
    x = torch.randn(n, size, device=device).to(dtype)
    expected = plain.fp4_linear(x.float(), packed, scales, global_scale, group, None)
    prepared = packed_layout.prepare_fp4(packed, scales, global_scale, group)
    assert prepared[0].dtype == torch.int16
    close(packed_ops.fp4_linear(x, *prepared, group, None), expected, tolerance_of(dtype))


# -- experts

# One token alone may be off by 1.2 % in bfloat16: weights, both products and what is between them
# are rounded.
EXPERT_TOKENS = [(1, False), (30, True), (130, False)] if ON_GPU else [(1, False), (9, True)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["row", "whole", "block"])
@pytest.mark.parametrize(("n", "bias"), EXPERT_TOKENS)
def test_experts_in_fp8_are_the_references(
    device: torch.device, kind: str, dtype: torch.dtype, n: int, bias: bool
) -> None:
    inputs, biases = experts_case(device, n, dtype, bias)

    def stacked(out: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = [fp8_weight(kind, out, size, device) for _ in range(5)]
        numbers = torch.stack([numbers.view(torch.uint8) for numbers, _ in pairs])
        return numbers.view(torch.float8_e4m3fn), torch.stack([scale for _, scale in pairs])

    matrices = (*stacked(192, 160), *stacked(160, 96))
    static = torch.tensor(0.01, device=device) if bias else None
    rest = (*matrices, static, None, "silu", *biases)
    ours = fp8_experts.fp8_experts(*inputs, *rest)
    # What is rounded a second time may fall to the other side.
    close(ours, reference.fp8_experts(*inputs, *rest), max(10 * tolerance_of(dtype), 1e-2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "zeros"), [(32, True), (16, False), (0, True)])
@pytest.mark.parametrize(("n", "bias"), EXPERT_TOKENS)
def test_experts_with_weights_of_4_bits_are_the_references(
    device: torch.device, group: int, zeros: bool, dtype: torch.dtype, n: int, bias: bool
) -> None:
    inputs, biases = experts_case(device, n, dtype, bias)

    def stacked(out: int, size: int) -> list[torch.Tensor | None]:
        own = group or size
        parts = [w4_weight(out, size, own, zeros, dtype, device) for _ in range(5)]
        return [
            None if column[0] is None else torch.stack(column)  # type: ignore[arg-type]
            for column in zip(*parts, strict=True)
        ]

    first, second = stacked(192, 160), stacked(160, 96)
    size = group or 160
    rest = ("swiglu_clamped", *biases)
    theirs = reference.w4_experts(*inputs, *first, *second, size, *rest)  # type: ignore[arg-type]
    prepared = [
        *packed_layout.prepare_w4(*first, size),
        *packed_layout.prepare_w4(*second, min(size, 96)),
    ]  # type: ignore[arg-type]
    ours = packed_experts.w4_experts(*inputs, *prepared, size, *rest)  # type: ignore[arg-type]
    close(ours, theirs, 4 * tolerance_of(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "bias"), EXPERT_TOKENS[:2])
def test_experts_with_weights_of_4_floating_point_bits_are_the_references(
    device: torch.device, dtype: torch.dtype, n: int, bias: bool
) -> None:
    inputs, biases = experts_case(device, n, dtype, bias)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)

    def scales(*shape: int) -> torch.Tensor:
        return (torch.rand(*shape, device=device) + 0.1).to(torch.float8_e4m3fn)

    first = (numbers(5, 192, 80), scales(5, 192, 10), torch.rand(5, 192, device=device))
    second = (numbers(5, 160, 48), scales(5, 160, 6), None)
    theirs = reference.fp4_experts(*inputs, *first, *second, 16, "silu", *biases)
    prepared = (*packed_layout.prepare_fp4(*first, 16), *packed_layout.prepare_fp4(*second, 16))
    ours = packed_experts.fp4_experts(*inputs, *prepared, 16, "silu", *biases)
    close(ours, theirs, 4 * tolerance_of(dtype))
