"""Triton's products with weights of 8 bits by group and with tables, against the reference."""

from __future__ import annotations

import pytest
import torch
from expert_cases import experts_case

from penstock.ops import quantized as plain
from penstock.ops import reference

pytest.importorskip("triton", reason="needs Triton")

from penstock.ops.triton import packed as packed_ops
from penstock.ops.triton import packed_experts, packed_layout, slabs
from penstock.ops.triton.tuning import Launch
from penstock.ops.triton.tuning_quantized import TilePlan

ON_GPU = torch.cuda.is_available()
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if ON_GPU else [torch.float32]
# Columns that share a scale, and columns; 0: one scale a row.
GROUPS = [(64, 192), (32, 160), (10, 50), (0, 130)]
if ON_GPU:
    GROUPS += [(64, 256), (128, 384), (16, 48)]
EXPERT_TOKENS = [(1, False), (30, True), (130, False)] if ON_GPU else [(1, False), (9, True)]


def close(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> None:
    """Relative to the whole result; a NaN is never close."""
    error = (ours.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-30)
    assert ours.shape == theirs.shape
    assert float(error) < (1e-5 if dtype == torch.float32 else 2e-2)


def table_weight(
    *shape: int, group: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *rows, columns = shape
    packed = torch.randint(0, 256, (*rows, columns // 2), dtype=torch.uint8, device=device)
    scales = torch.rand(*rows, columns // (group or columns), device=device) + 0.1
    return packed, scales, torch.linspace(-1, 0.9, 16, device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "size"), GROUPS)
@pytest.mark.parametrize("n", [1, 130])  # tiles, and floats for cuBLAS
def test_rows_with_weights_from_a_table_are_the_references(
    device: torch.device, dtype: torch.dtype, group: int, size: int, n: int
) -> None:
    packed, scales, values = table_weight(70, size, group=group, device=device)
    x = torch.randn(n, size, device=device).to(dtype)
    bias = torch.randn(70, device=device).to(dtype)
    expected = plain.table_linear(x.float(), packed, scales, values, bias.float())
    prepared = packed_layout.prepare_table(packed)
    close(packed_ops.table_linear(x, prepared, scales, values, bias), expected, dtype)


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_parts_of_the_columns_add_up(device: torch.device, splits: int) -> None:
    packed, scales, values = table_weight(70, 640, group=64, device=device)
    x = torch.randn(5, 640, device=device)
    expected = plain.table_linear(x, packed, scales, values, None)
    data = packed_layout.prepare_table(packed)
    weight = packed_layout.Packed(data, scales, None, 64, "table", values)
    plan = TilePlan(64, 16, splits, Launch(4, 2))
    close(packed_ops.run_tiles(x, weight, None, plan), expected, torch.float32)


def test_slabs_of_a_large_matrix_are_the_whole(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slabs, "SLAB", 128 * 9)
    monkeypatch.setattr(packed_layout, "SLAB", 128 * 7)
    packed, scales, values = table_weight(40, 128, group=64, device=device)
    x, bias = torch.randn(130, 128, device=device), torch.randn(40, device=device)
    expected = plain.table_linear(x, packed, scales, values, bias)
    prepared = packed_layout.prepare_table(packed)
    close(packed_ops.table_linear(x, prepared, scales, values, bias), expected, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "size"), GROUPS)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("n", [19, 130])
def test_rows_with_weights_of_8_bits_are_the_references(
    device: torch.device, dtype: torch.dtype, group: int, size: int, zeros: bool, n: int
) -> None:
    data, scales, points = int_weight(70, size, group=group, zeros=zeros, device=device)
    x = torch.randn(n, size, device=device).to(dtype)
    expected = plain.w4_linear(x.float(), data, scales, points, group or size, None, 8)
    close(packed_ops.w8_linear(x, data, scales, points, group or size, None), expected, dtype)


def test_columns_may_be_in_another_order(device: torch.device) -> None:
    data, scales, _ = int_weight(24, 96, group=32, zeros=False, device=device)
    x, perm = torch.randn(3, 80, device=device), torch.randint(0, 80, (96,), device=device)
    expected = plain.w8_linear(x, data, scales, None, 32, None, perm)
    close(packed_ops.w8_linear(x, data, scales, None, 32, None, perm), expected, torch.float32)


def int_weight(
    *shape: int, group: int, zeros: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    *rows, columns = shape
    data = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    # Small enough for what two layers make of them to be a float16.
    scales = (torch.rand(*rows, columns // (group or columns), device=device) + 0.1) / 128
    points = torch.randint_like(scales, 0, 256).to(torch.uint8) if zeros else None
    return data, scales, points


def test_no_rows_give_no_rows(device: torch.device) -> None:
    packed, scales, values = table_weight(8, 128, group=64, device=device)
    x = torch.empty(0, 128, device=device)
    prepared = packed_layout.prepare_table(packed)
    assert packed_ops.table_linear(x, prepared, scales, values, None).shape == (0, 8)


# -- experts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "bias"), EXPERT_TOKENS)
@pytest.mark.parametrize("group", [32, 0])
def test_experts_with_weights_from_a_table_are_the_references(
    device: torch.device, dtype: torch.dtype, n: int, bias: bool, group: int
) -> None:
    inputs, biases = experts_case(device, n, dtype, bias)
    gate_up, gate_up_scales, values = table_weight(5, 192, 160, group=group, device=device)
    down, down_scales, _ = table_weight(5, 160, 96, group=group, device=device)
    rest = (values, "silu", *biases)
    theirs = reference.table_experts(*inputs, gate_up, gate_up_scales, down, down_scales, *rest)
    prepare = packed_layout.prepare_table
    ours = packed_experts.table_experts(
        *inputs, prepare(gate_up), gate_up_scales, prepare(down), down_scales, *rest
    )
    close(ours, theirs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "bias"), EXPERT_TOKENS)
@pytest.mark.parametrize(("group", "zeros"), [(32, True), (16, False), (0, True)])
def test_experts_with_weights_of_8_bits_are_the_references(
    device: torch.device, dtype: torch.dtype, n: int, bias: bool, group: int, zeros: bool
) -> None:
    inputs, biases = experts_case(device, n, dtype, bias)
    first = int_weight(5, 192, 160, group=group, zeros=zeros, device=device)
    second = int_weight(5, 160, 96, group=group, zeros=zeros, device=device)
    rest = (*first, *second, group or 160, "swiglu_clamped", *biases)
    close(packed_experts.w8_experts(*inputs, *rest), reference.w8_experts(*inputs, *rest), dtype)
