"""int8 products through torch's integer matmul, against the reference."""

from __future__ import annotations

import pytest
import torch

from penstock.ops import quantized as plain
from penstock.ops.triton.int8 import int8_linear

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("rows", [1, 7, 16, 17, 33, 100])
@pytest.mark.parametrize(("out", "size"), [(64, 32), (24, 136), (7, 40), (16, 33)])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_references_product(
    rows: int, out: int, size: int, static: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(rows * out)
    weight, scale = plain.quantize_int8_by_row(torch.randn(out, size, device=DEVICE))
    x = torch.randn(rows, size, device=DEVICE).to(dtype)
    x[0] = 0.0
    bias = torch.randn(out, device=DEVICE) if static else None
    input_scale = torch.tensor(0.03, device=DEVICE) if static else None
    ours = int8_linear(x, weight, scale, input_scale, bias)
    theirs = plain.int8_linear(x, weight, scale, input_scale, bias)
    assert ours.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert torch.allclose(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance)


def test_one_scale_for_all_rows() -> None:
    weight = torch.randint(-128, 128, (16, 32), dtype=torch.int8, device=DEVICE)
    scale, x = torch.tensor(0.02, device=DEVICE), torch.randn(3, 32, device=DEVICE)
    ours = int8_linear(x, weight, scale, None, None)
    assert torch.allclose(ours, plain.int8_linear(x, weight, scale, None, None), atol=1e-4)
