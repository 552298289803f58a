"""Triton's mask of bits against the reference's."""

from __future__ import annotations

import pytest
import torch

from penstock.ops.sampling import unpack_bitmask

pytest.importorskip("triton", reason="needs Triton")

from penstock.ops.triton.bitmask import apply_bitmask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [31, 32, 4096, 9001])
def test_what_has_no_bit_becomes_minus_infinity(
    device: torch.device, vocab_size: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(6, vocab_size, generator=generator).to(dtype)
    logits[2, 0] = float("nan")  # is allowed, and stays
    num_words = -(-vocab_size // 32)
    bits = torch.randint(-(2**31), 2**31, (3, num_words), generator=generator, dtype=torch.int32)
    bits[:, 0] |= 1
    rows = torch.tensor([5, 0, 2])
    expected = logits.clone()
    expected[rows] = expected[rows].masked_fill(~unpack_bitmask(bits, vocab_size), -torch.inf)
    changed = logits.clone().to(device)
    apply_bitmask(changed, bits.to(device), rows.to(device))
    assert torch.equal(changed.cpu().nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
    assert not torch.equal(changed.cpu()[0], logits[0])


def test_rows_may_lie_apart(device: torch.device) -> None:
    """As in a buffer that is wider than the vocabulary; what is beside it is not touched."""
    wide = torch.zeros(2, 100, device=device)
    bits = torch.zeros(2, 2, dtype=torch.int32, device=device)
    bits[1] = -1
    apply_bitmask(wide[:, :40], bits, torch.arange(2, device=device))
    assert torch.isneginf(wide[0, :40]).all()
    assert (wide[0, 40:] == 0).all()
    assert (wide[1] == 0).all()
