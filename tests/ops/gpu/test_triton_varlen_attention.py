"""Triton's attention over packed batches against the reference."""

from __future__ import annotations

import itertools

import pytest
import torch

from penstock.ops import reference

pytest.importorskip("triton", reason="needs Triton")

from penstock.ops.triton.varlen_attention import varlen_attention


def check(
    device: torch.device,
    lengths: list[int],
    heads: tuple[int, int],
    head_dim: int,
    reach: int | None = None,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
) -> None:
    num_heads, kv_heads = heads
    starts = [0, *itertools.accumulate(lengths)]
    rows = torch.randn(starts[-1] + padding, num_heads + 2 * kv_heads, head_dim)
    rows[starts[-1] :] = float("nan")  # what belongs to nobody must not matter
    rows = rows.to(device, dtype)
    query, key, value = rows.split([num_heads, kv_heads, kv_heads], dim=1)
    where = torch.tensor(starts, dtype=torch.int32, device=device)
    scale = head_dim**-0.5
    found = varlen_attention(query, key, value, where, scale, reach)[: starts[-1]]
    own = (x[: starts[-1]].double() for x in (query, key, value))
    expected = reference.varlen_attention(*own, where, scale, reach)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("reach", [None, 0, 5, 40, 500])
def test_requests_of_any_length(device: torch.device, reach: int | None) -> None:
    check(device, [1, 30, 32, 0, 65, 130, 64], (4, 4), 32, reach)


@pytest.mark.parametrize(("heads", "head_dim"), [((6, 2), 64), ((2, 1), 80), ((3, 3), 12)])
def test_heads_that_share_keys_and_heads_of_any_size(
    device: torch.device, heads: tuple[int, int], head_dim: int
) -> None:
    check(device, [17, 70], heads, head_dim)


def test_shorter_types(device: torch.device) -> None:
    check(device, [33, 90], (4, 4), 64, 20, torch.float16)
    if device.type == "cuda":  # the interpreter's dot does not know bfloat16
        check(device, [33, 90], (4, 4), 64, 20, torch.bfloat16)


def test_rows_behind_the_last_request_are_left_alone(device: torch.device) -> None:
    check(device, [9, 40, 0, 0], (2, 2), 32, padding=100)
    check(device, [9, 40, 0, 0], (2, 2), 32, reach=3, padding=100)
