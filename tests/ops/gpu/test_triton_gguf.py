"""Triton's products with GGUF blocks against the gguf package's floats, over types and shapes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from penstock.loading.gguf.file import GGML_TYPES
from penstock.ops import reference
from penstock.ops.blocks import BlockTensor
from penstock.ops.gguf_blocks import FORMATS
from penstock.ops.gguf_recode import RECODINGS

pytest.importorskip("triton", reason="needs Triton")

from gguf_builder import random_blocks

from penstock.ops.triton import gguf as kernels
from penstock.ops.triton import slabs
from penstock.ops.triton.gguf_experts import gguf_experts
from penstock.ops.triton.gguf_layout import LAYOUTS, Planes, prepare_gguf, stack_gguf
from penstock.ops.triton.gguf_row import can_multiply, tensor_rows
from penstock.ops.triton.tuning import Launch
from penstock.ops.triton.tuning_gguf import RowPlan, TensorPlan

ON_GPU = torch.cuda.is_available()
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if ON_GPU else [torch.float32]
BY_NAME = {ggml_type.name: ggml_type for ggml_type in GGML_TYPES.values()}
TYPES = list(LAYOUTS)
OF_EACH_KIND = ["Q4_0", "Q5_1", "Q8_0", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS", "IQ2_S", "IQ3_XXS"]


def check(
    ours: torch.Tensor, x: torch.Tensor, floats: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Ours is x times floats + bias, but for rounding: relative to what is summed up."""
    added = torch.zeros(len(floats), device=x.device) if bias is None else bias.double()
    expected = x.double() @ floats.double().T + added
    summed = x.double().abs() @ floats.double().abs().T + added.abs()
    tolerance = 1e-5 if x.dtype == torch.float32 else 1.1 * 2.0**-8  # bfloat16's result: 2^-8
    assert ours.shape == expected.shape
    assert bool((((ours - expected) / summed).abs() < tolerance).all())  # a NaN never is


def make(
    type_name: str, rows: int, columns: int, device: torch.device, seed: int = 0
) -> tuple[Planes, torch.Tensor]:
    """A matrix of random blocks, and the floats that the gguf package makes of them."""
    data = random_blocks(np.random.default_rng(seed), type_name, rows, columns)
    floats = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[type_name])
    blocks = BlockTensor(*BY_NAME[type_name], torch.from_numpy(data))
    planes = prepare_gguf(blocks, device)
    return planes, torch.from_numpy(floats.reshape(rows, columns)).to(device)


def columns_of(type_name: str, blocks: int) -> int:
    """So many whole blocks; of the small ones, eight for one of the large ones, less one."""
    return blocks * 256 if BY_NAME[type_name].block_size == 256 else blocks * 256 - 32


def test_every_type_that_is_read_has_a_layout_or_is_recoded() -> None:
    recoded = {name for name, recoding in RECODINGS.items() if recoding.target in LAYOUTS}
    # NVFP4, whose matrices have a scale beside those of their blocks, becomes floats.
    assert LAYOUTS.keys() | recoded | {"NVFP4"} == FORMATS.keys()


@pytest.mark.parametrize("type_name", TYPES)
def test_memory_is_the_files(type_name: str, device: torch.device) -> None:
    planes, _ = make(type_name, 3, columns_of(type_name, 2), device)
    block = BY_NAME["TQ2_0" if type_name == "TQ1_0" else type_name]
    held = sum(tensor.nbytes for tensor in planes.tensors().values())
    in_file = 3 * planes.shape[1] // block.block_size * block.block_bytes
    assert in_file <= held <= in_file + (3 * 12 if type_name in ("Q5_0", "Q5_1") else 0)
    assert all(tensor.is_contiguous() for tensor in planes.tensors().values())


@pytest.mark.parametrize("type_name", TYPES)
def test_floats_are_those_of_the_gguf_package(type_name: str, device: torch.device) -> None:
    planes, floats = make(type_name, 2, columns_of(type_name, 3), device)
    ours = kernels.as_floats(planes, torch.float32)
    if ON_GPU:  # which may round a product and a sum as one
        torch.testing.assert_close(ours, floats, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(ours, floats)


@pytest.mark.parametrize("type_name", OF_EACH_KIND)
def test_rows_are_found_by_number(type_name: str, device: torch.device) -> None:
    planes, floats = make(type_name, 9, columns_of(type_name, 1), device)
    ids = torch.tensor([7, 0, 7], device=device)
    ours = kernels.gguf_embed(ids, planes, torch.bfloat16)
    torch.testing.assert_close(ours, floats[ids].bfloat16(), rtol=1e-2, atol=1e-5)
    assert kernels.gguf_embed(ids[:0], planes, torch.bfloat16).shape == (0, planes.shape[1])


def matmul_case(
    n: int, planes: Planes, rows: int, has_bias: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Activations, a bias and a poisoned output."""
    device = planes.words.device
    x = (torch.randn(n, planes.shape[1], device=device) * 0.01).to(dtype)  # in float16's range
    bias = torch.randn(rows, device=device).to(dtype) if has_bias else None
    return x, bias, torch.full((n, rows), torch.nan, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "rows", "blocks", "steps"), [(1, 1, 3, 1), (3, 7, 1, 2)])
@pytest.mark.parametrize("type_name", TYPES)
def test_single_rows_are_multiplied_by_every_type(
    type_name: str,
    n: int,
    rows: int,
    blocks: int,
    steps: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    planes, floats = make(type_name, rows, columns_of(type_name, blocks), device)
    x, bias, out = matmul_case(n, planes, rows, rows > 1, dtype)
    plan = RowPlan(16, steps, Launch(1, 3))
    check(kernels.single_rows(x, planes, bias, out, plan), x, floats, bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16] if ON_GPU else [torch.float32])
@pytest.mark.parametrize("shape", [(3, 20, 1, 1, 1), (1, 16, 3, 1, 2), (2, 17, 4, 2, 1)])
@pytest.mark.parametrize(
    "type_name", [own for own in TYPES if can_multiply(LAYOUTS[own], torch.bfloat16)]
)
def test_single_rows_are_multiplied_on_the_tensor_cores(
    type_name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    n, rows, blocks, warps, turns = shape
    planes, floats = make(type_name, rows, columns_of(type_name, blocks), device)
    x, bias, out = matmul_case(n, planes, rows, rows > 16, dtype)
    plan = TensorPlan(warps, turns, None)
    check(tensor_rows(x, planes, bias, out, plan), x, floats, bias)


@pytest.mark.parametrize("n", [0, 1, 3, 7])
@pytest.mark.parametrize("type_name", ["Q5_1", "Q6_K"])
def test_any_number_of_rows_goes_into_columns_of_a_larger_result(
    type_name: str, n: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slabs, "SLAB", 5 * 256)
    planes, floats = make(type_name, 7, columns_of(type_name, 1), device)
    x = torch.randn(n, planes.shape[1] + 8, device=device)[:, 8:]
    bias = torch.randn(7, device=device)
    whole = torch.full((n, 14), torch.nan, device=device)
    kernels.gguf_linear(x, planes, bias, whole[:, 4:11])
    check(whole[:, 4:11], x, floats, bias)
    assert bool(whole[:, :4].isnan().all())
    assert bool(whole[:, 11:].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("type_name", ["Q4_K", "Q8_0"])
def test_a_row_is_the_same_among_a_few(
    type_name: str, dtype: torch.dtype, device: torch.device
) -> None:
    planes, _ = make(type_name, 33, columns_of(type_name, 2), device)
    x = (torch.randn(4, planes.shape[1], device=device) * 0.01).to(dtype)
    together = kernels.gguf_linear(x, planes, None)
    for index in range(4):
        alone = kernels.gguf_linear(x[index : index + 1], planes, None)
        assert torch.equal(alone[0], together[index])


@pytest.mark.parametrize("type_name", OF_EACH_KIND)
def test_matrices_of_one_type_stand_one_above_the_other(
    type_name: str, device: torch.device
) -> None:
    made = [make(type_name, rows, columns_of(type_name, 1), device, rows) for rows in (2, 1)]
    stacked = stack_gguf([planes for planes, _ in made])
    ours = kernels.as_floats(stacked, torch.float32)
    torch.testing.assert_close(ours, torch.cat([floats for _, floats in made]))
    assert torch.equal(kernels.as_floats(stacked.rows(1, 3), torch.float32), ours[1:3])


@pytest.mark.parametrize(
    ("types", "n", "activation"),
    [
        (("Q4_K", "Q4_K", "Q6_K"), 1, "silu"),
        (("Q5_0", "Q8_0", "Q4_1"), 9, "gelu_tanh"),
        (("IQ2_XS", "IQ2_XS", "IQ3_S"), 1, "silu"),
    ],
)
def test_experts_are_the_references(
    types: tuple[str, ...], n: int, activation: str, device: torch.device
) -> None:
    hidden, size, num_experts, top_k = 256, 256 if n == 1 else 64, 3, 2
    if types[0] == types[1]:
        gate_up = [make(types[0], num_experts * 2 * size, hidden, device)]
        floats = gate_up[0][1].view(num_experts, 2 * size, hidden)
    else:
        gate_up = [make(own, num_experts * size, hidden, device) for own in types[:2]]
        floats = torch.cat([own.view(num_experts, size, hidden) for _, own in gate_up], dim=1)
    down, down_floats = make(types[2], num_experts * hidden, size, device)
    x = torch.randn(n, hidden, device=device) * 0.001
    weights = torch.rand(n, top_k, device=device)
    ids = torch.rand(n, num_experts, device=device).topk(top_k).indices.int()
    ours = gguf_experts(x, weights, ids, [planes for planes, _ in gate_up], down, activation)
    down_floats = down_floats.view(num_experts, hidden, size)
    theirs = reference.experts(x, weights, ids, floats, down_floats, activation)
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-4


@pytest.mark.parametrize("dtype", DTYPES[:2])  # float16 has no room for such results
@pytest.mark.parametrize("type_name", TYPES)
def test_experts_are_multiplied_by_every_type(
    type_name: str, dtype: torch.dtype, device: torch.device
) -> None:
    hidden, size, n = columns_of(type_name, 3), 32, 19  # more rows than float32's blocks have
    gate_up, floats = make(type_name, 2 * size, hidden, device)
    down, down_floats = make("Q8_0", hidden, size, device)
    x = (torch.randn(n, hidden, device=device) * 1e-3).to(dtype)
    weights, ids = torch.ones(n, 1, device=device), torch.zeros(n, 1, device=device).int()
    ours = gguf_experts(x, weights, ids, [gate_up], down, "silu").double()
    theirs = reference.experts(
        x.double(), weights.double(), ids, floats[None].double(), down_floats[None].double(), "silu"
    )
    assert float((ours - theirs).norm() / theirs.norm()) < (1e-4 if x.dtype.itemsize == 4 else 1e-2)
