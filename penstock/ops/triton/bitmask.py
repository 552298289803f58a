"""Bans tokens with a bitmask: disallowed logits become minus infinity, in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

WORDS = 128  # of 32 tokens each, per program


@triton.jit
def _bitmask_kernel(
    logits_ptr, bits_ptr, rows_ptr, logits_stride, bits_stride, first, num_tokens, num_words,
    WORDS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    row = tl.load(rows_ptr + index).to(tl.int64)
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    bits = tl.load(
        bits_ptr + index.to(tl.int64) * bits_stride + words, mask=words < num_words, other=-1
    )
    offsets = tl.arange(0, 32)
    banned = ((bits[:, None] >> offsets[None, :]) & 1) == 0
    tokens = words[:, None] * 32 + offsets[None, :] - first
    # Logits are not read: those of allowed tokens stay unchanged.
    tl.store(
        logits_ptr + row * logits_stride + tokens,
        float("-inf"),
        mask=banned & (tokens >= 0) & (tokens < num_tokens),
    )


def apply_bitmask(
    logits: torch.Tensor,  # [*, num_tokens], changed in place
    bits: torch.Tensor,  # [n, ceil(vocab_size / 32)] int32: token t is bit t % 32 of word t // 32
    rows: torch.Tensor,  # [n] int64: the row of logits that each row of bits belongs to
    first: int = 0,  # the token of the first column
) -> None:
    """Set the logits of tokens whose bit is 0 to minus infinity."""
    num_tokens, num_words = logits.shape[1], bits.shape[1]
    assert num_words >= -(-(first + num_tokens) // 32)
    assert logits.stride(1) == 1
    assert bits.stride(1) == 1
    grid = (len(rows), triton.cdiv(num_words, WORDS))
    _bitmask_kernel[grid](
        logits,
        bits,
        rows,
        logits.stride(0),
        bits.stride(0),
        first,
        num_tokens,
        num_words,
        WORDS=WORDS,
    )
