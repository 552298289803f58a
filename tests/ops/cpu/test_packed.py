"""Weights in the library's layout: what was packed, and what is multiplied with it."""

from __future__ import annotations

import pytest
import torch

from penstock.loading.gguf.dequant import dequantize
from penstock.loading.gguf.file import GGML_TYPES, GGUFTensor
from penstock.ops.blocks import BlockTensor, take_columns
from penstock.ops.cpu.packed import PackedLinear, PackedMatrix, quantize_int8
from penstock.protocol.errors import ModelError

BLOCK_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
TYPES = {ggml_type.name: ggml_type for ggml_type in GGML_TYPES.values()}
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_blocks(
    name: str, rows: int, columns: int, generator: torch.Generator
) -> tuple[BlockTensor, torch.Tensor]:
    """Blocks with every bit at random but for sane scales, and the floats that they stand for."""
    kind = TYPES[name]
    shape = (rows, columns // kind.block_size, kind.block_bytes)
    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    for at in HALVES.get(name, (0,)):
        scale = torch.rand(*shape[:2], 1, generator=generator) * 0.02 - 0.01
        data[:, :, at : at + 2] = scale.to(torch.float16).view(torch.uint8)
    data = data.view(rows, -1)
    floats = dequantize(GGUFTensor("x", kind, (rows, columns), 0, 0), data.view(-1))
    return BlockTensor(kind.name, kind.block_size, kind.block_bytes, data), floats


def quantized(x: torch.Tensor) -> torch.Tensor:
    """What is left of activations in 8 bits, blocks of 32 with a scale each."""
    blocks = x.view(x.shape[0], -1, 32)
    largest = blocks.abs().amax(-1, keepdim=True)
    return ((blocks * (127.0 / largest)).round() * (largest / 127.0)).view(x.shape)


@pytest.mark.parametrize("name", BLOCK_TYPES)
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_packed_blocks_are_the_floats_that_gguf_defines_bit_for_bit(
    isa: str, generator: torch.Generator, name: str, rows: int
) -> None:
    blocks, floats = random_blocks(name, rows, 512, generator)
    order = torch.randperm(rows, generator=generator)
    assert torch.equal(PackedMatrix(blocks).embed(order), floats[order])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_floats_are_unchanged(
    isa: str, generator: torch.Generator, dtype: torch.dtype
) -> None:
    weight = torch.randn(21, 33, generator=generator).to(dtype)
    assert torch.equal(PackedMatrix(weight).embed(torch.arange(21)), weight.float())


@pytest.mark.parametrize("name", BLOCK_TYPES)
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 256), (40, 512), (83, 1024)])
def test_a_matmul_on_blocks_is_the_float_matmul_on_8_bit_activations(
    isa: str, generator: torch.Generator, name: str, out_features: int, in_features: int
) -> None:
    blocks, floats = random_blocks(name, out_features, in_features, generator)
    linear = PackedLinear([PackedMatrix(blocks)])
    bias = torch.randn(out_features, generator=generator)
    for rows in (1, 2, 3, 8, 45):
        x = torch.randn(rows, in_features, generator=generator)
        expected = quantized(x).double() @ floats.double().T + bias
        size = x.abs().amax() * floats.abs().sum(-1).amax()
        assert (linear(x, bias) - expected).abs().amax() < 1e-6 * size + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (40, 64), (83, 129)])
def test_a_matmul_on_floats_is_torchs(
    isa: str, generator: torch.Generator, dtype: torch.dtype, out_features: int, in_features: int
) -> None:
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    linear = PackedLinear([PackedMatrix(weight)])
    for rows in (1, 3, 8, 45):
        x = torch.randn(rows, in_features, generator=generator)
        torch.testing.assert_close(linear(x, None), x @ weight.float().T, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", [*BLOCK_TYPES, "F32", "BF16"])
def test_a_rows_result_does_not_depend_on_the_rows_beside_it(
    isa: str, generator: torch.Generator, name: str
) -> None:
    if name in BLOCK_TYPES:
        weight, _ = random_blocks(name, 70, 512, generator)
        linear = PackedLinear([PackedMatrix(weight)])
    else:
        floats = torch.randn(70, 512, generator=generator)
        linear = PackedLinear([PackedMatrix(floats if name == "F32" else floats.bfloat16())])
    x = torch.randn(67, 512, generator=generator)
    alone = torch.cat([linear(row[None], None) for row in x])
    for rows in (2, 3, 5, 8, 12, 15, 33, 67):
        assert torch.equal(linear(x[:rows], None), alone[:rows])


def test_parts_of_different_types_stand_side_by_side(isa: str, generator: torch.Generator) -> None:
    first, _ = random_blocks("Q4_1", 24, 256, generator)
    second = torch.randn(9, 256, generator=generator)
    third, _ = random_blocks("Q6_K", 17, 256, generator)
    parts = [PackedMatrix(part) for part in (first, second, third)]
    x, bias = torch.randn(5, 256, generator=generator), torch.randn(50, generator=generator)
    apart = [
        PackedLinear([part])(x, own)
        for part, own in zip(parts, bias.split([24, 9, 17]), strict=True)
    ]
    assert torch.equal(PackedLinear(parts)(x, bias), torch.cat(apart, dim=1))


@pytest.mark.parametrize("x", [torch.ones(3, 63), torch.ones(3, 65), torch.ones(3, 64).half()])
def test_what_has_other_columns_or_numbers_than_the_weight_is_refused(x: torch.Tensor) -> None:
    """The library would read past its end."""
    linear = PackedLinear([PackedMatrix(torch.randn(8, 64))])
    with pytest.raises(ValueError, match=r"x must be \[n, 64\] float32, got \[3, 6"):
        linear(x, None)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_not_a_number_shows_in_its_own_row_alone(
    isa: str, generator: torch.Generator, poison: float
) -> None:
    weight, _ = random_blocks("Q4_1", 24, 256, generator)
    x = torch.randn(3, 256, generator=generator)
    x[1, 77] = poison
    y = PackedLinear([PackedMatrix(weight)])(x, None)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


def test_rows_of_zeros_give_zeros(isa: str, generator: torch.Generator) -> None:
    weight, _ = random_blocks("Q4_0", 24, 256, generator)
    y = PackedLinear([PackedMatrix(weight)])(torch.zeros(2, 256), None)
    assert torch.equal(y, torch.zeros(2, 24))


def test_no_rows_give_no_rows(isa: str, generator: torch.Generator) -> None:
    weight, _ = random_blocks("Q8_0", 24, 256, generator)
    assert PackedLinear([PackedMatrix(weight)])(torch.zeros(0, 256), None).shape == (0, 24)


def test_int8_weights_are_within_half_a_step_of_the_floats(
    isa: str, generator: torch.Generator
) -> None:
    weight = torch.randn(40, 96, generator=generator)
    weight[3] = 0.0
    kept = PackedMatrix(quantize_int8(weight)).embed(torch.arange(40))
    step = weight.view(40, 3, 32).abs().amax(-1, keepdim=True) / 127
    error = (kept - weight).view(40, 3, 32).abs()
    assert (error <= step * 0.57).all()  # the scale itself is rounded to a float16


def test_a_shard_of_columns_must_end_between_blocks(generator: torch.Generator) -> None:
    weight, floats = random_blocks("Q4_1", 4, 256, generator)
    shard = take_columns(weight, 64, 128)
    assert isinstance(shard, BlockTensor)
    assert shard.shape == (4, 64)
    assert torch.equal(PackedMatrix(shard).embed(torch.arange(4)), floats[:, 64:128])
    with pytest.raises(ModelError, match="column 100, falls inside a Q4_1 block of 32"):
        take_columns(weight, 0, 100)
