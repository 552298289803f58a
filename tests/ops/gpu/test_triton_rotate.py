"""The rotation of a vision tower's queries and keys, against torch's."""

from __future__ import annotations

import pytest
import torch

from penstock.layers.vision import rotate

pytest.importorskip("triton", reason="needs Triton")

from penstock.ops.triton.vision_rotary import rotate_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(16, 80), (3, 16)])
def test_rows_are_rotated_in_place(
    device: torch.device, dtype: torch.dtype, num_heads: int, head_dim: int
) -> None:
    qkv = torch.randn(7, 3, num_heads, head_dim, device=device).to(dtype)
    angles = torch.randn(7, 1, head_dim // 2, device=device)
    cos, sin = angles.cos(), angles.sin()
    query, key, value = (part.clone() for part in qkv.unbind(1))
    rotate_rows(*qkv.unbind(1)[:2], cos, sin)
    limit = 1e-6 if dtype == torch.float32 else 2**-7  # the interpreter rounds otherwise
    torch.testing.assert_close(qkv[:, 0], rotate(query, (cos, sin)), atol=limit, rtol=limit)
    torch.testing.assert_close(qkv[:, 1], rotate(key, (cos, sin)), atol=limit, rtol=limit)
    assert torch.equal(qkv[:, 2], value)
