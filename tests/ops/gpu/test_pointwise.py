"""Norms, activation, embedding and the pass before attention, against the reference."""

from __future__ import annotations

import pytest
import torch

from penstock.ops import reference

pytest.importorskip("triton", reason="needs Triton")

from penstock.ops.triton import pointwise
from penstock.ops.triton.linear import linear
from penstock.ops.triton.rotary import norm_rotate_write

DTYPES = [torch.float32, torch.float16]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    tolerance = 1e-5 if ours.dtype == torch.float32 else 4e-3
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 100, 1024])
def test_norm_with_and_without_residual(
    device: torch.device, dtype: torch.dtype, size: int
) -> None:
    x, residual = torch.randn(2, 5, size, device=device, dtype=dtype)
    weight = torch.randn(size, device=device, dtype=dtype)
    close(pointwise.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    normed, total = reference.add_rms_norm(x, residual, weight, 1e-6)
    our_normed, our_total = pointwise.add_rms_norm(x, residual, weight, 1e-6)
    close(our_normed, normed)
    close(our_total, total)


def test_norm_of_heads_that_lie_apart(device: torch.device) -> None:
    heads = torch.randn(3, 6, 32, device=device)[:, 1:3]
    weight = torch.randn(32, device=device)
    close(pointwise.rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 100, 1024])
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm_with_and_without_residual(
    device: torch.device, dtype: torch.dtype, size: int, has_bias: bool
) -> None:
    x, wide = torch.randn(2, 5, 2 * size, device=device, dtype=dtype) + 3
    x, residual = x[:, :size], wide[:, size:]  # rows that lie apart
    weight, bias = torch.randn(2, size, device=device, dtype=dtype)
    own = bias if has_bias else None
    for other in (None, residual):
        ours = pointwise.layer_norm(x, weight, own, 1e-6, other)
        close(ours, reference.layer_norm(x, weight, own, 1e-6, other))


def test_layer_norm_of_heads(device: torch.device) -> None:
    heads, weight = torch.randn(3, 2, 32, device=device), torch.randn(2, 32, device=device)
    expected = reference.layer_norm(heads, weight, None, 1e-6)
    close(pointwise.layer_norm(heads, weight, None, 1e-6), expected)


@pytest.mark.parametrize("size", [40, 200])
def test_sums_of_segments(device: torch.device, size: int) -> None:
    x = torch.randn(200, size, device=device, dtype=torch.float16)
    x[170:] = float("nan")  # belongs to no segment
    starts = torch.tensor([0, 1, 65, 129, 170], dtype=torch.int32, device=device)
    found = pointwise.segment_sums(x, starts)
    assert found.dtype == torch.float32
    expected = torch.stack([own.double().sum(0) for own in x[:170].split([1, 64, 64, 41])])
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [48, 1500])
def test_silu_mul(device: torch.device, dtype: torch.dtype, size: int) -> None:
    x = torch.randn(4, 2 * size, device=device, dtype=dtype)
    close(pointwise.silu_mul(x), reference.silu_mul(x))
    apart = torch.cat([x, x], dim=1)[:, : x.shape[1]]
    close(pointwise.silu_mul(apart), reference.silu_mul(x))


def test_embedding_rows(device: torch.device) -> None:
    weight = torch.randn(50, 100, device=device)
    tokens = torch.tensor([3, 49, 0, 3], dtype=torch.int32, device=device)
    assert torch.equal(pointwise.embed(tokens, weight), reference.embed(tokens, weight))


@pytest.mark.parametrize("n", [3, 70])  # one head a program, and several
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1)])
def test_norm_rotate_write_is_its_three_parts(
    device: torch.device, n: int, norm: bool, heads: int, kv_heads: int
) -> None:
    dim, block_size = 32, 4
    qkv = torch.randn(n, (heads + 2 * kv_heads) * dim, device=device)
    weights = torch.randn(2, dim, device=device)
    table = torch.randn(n, dim, device=device)  # cosines then sines, as the rotary layer has them
    cos, sin = table.unsqueeze(1).chunk(2, dim=-1)
    cache, expected = torch.zeros(2, 30, 2, block_size, kv_heads, dim, device=device)
    slots = (torch.randperm(29 * block_size, device=device) + block_size)[:n]

    query, key, value = qkv.view(n, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    if norm:
        query = reference.rms_norm(query, weights[0], 1e-6)
        key = reference.rms_norm(key, weights[1], 1e-6)
    query, key = reference.rotate_pair(query, key, cos, sin)
    reference.write_kv(key, value, expected, slots)

    got = norm_rotate_write(
        qkv.clone(), weights[0] if norm else None, weights[1] if norm else None, 1e-6,
        cos, sin, cache, slots, heads,
    )  # fmt: skip
    for ours, theirs in zip((*got, cache), (query, key, value, expected), strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("n", [1, 2])  # two go to the library
@pytest.mark.parametrize("size", [64, 1100, 2100])
@pytest.mark.parametrize("bias", [True, False])
def test_matrix_with_one_row(device: torch.device, n: int, size: int, bias: bool) -> None:
    x = torch.randn(n, size, device=device)
    weight = torch.randn(9, size, device=device) / 30
    added = torch.randn(9, device=device) if bias else None
    close(linear(x, weight, added), reference.linear(x, weight, added))


@pytest.mark.parametrize("n", [2, 5, 16, 17])  # the last goes to the library
@pytest.mark.parametrize("size", [256, 768, 200])  # and so does the last of these
@pytest.mark.parametrize("num_outputs", [70, pytest.param(9000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("bias", [True, False])
def test_matrix_with_a_few_rows(
    device: torch.device, n: int, size: int, num_outputs: int, bias: bool
) -> None:
    x = torch.randn(n, size, device=device).half()  # the interpreter has no bfloat16 products
    weight = (torch.randn(num_outputs, size, device=device) / 30).half()
    added = torch.randn(num_outputs, device=device).half() if bias else None
    expected = reference.linear(x.float(), weight.float(), None if added is None else added.float())
    whole = torch.zeros(n + 1, num_outputs + 3, dtype=x.dtype, device=device)
    out = whole[:n, :num_outputs]
    for found in (linear(x, weight, added), linear(x, weight, added, out)):
        assert torch.allclose(found.float(), expected, rtol=2e-2, atol=2e-2)
    assert not whole[n].any()
    assert not whole[:, num_outputs:].any()


def test_a_large_matrix_with_a_few_rows(device: torch.device) -> None:
    test_matrix_with_a_few_rows(device, 5, 256, 9000, True)
