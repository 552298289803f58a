"""Chooses tokens in C++, with the same bits as `penstock.ops.sampling`."""

from __future__ import annotations

import torch

from penstock.ops.cpu.library import loaded

_library = loaded()
_choose_tokens = _library.penstock_choose_tokens


def choose_tokens(
    logits: torch.Tensor,  # [rows, vocab] float32
    slots: torch.Tensor,  # [rows] int64
    positions: torch.Tensor,  # [rows] int64
    floats: torch.Tensor,  # [num_slots, *]: temperature, log of min_p, top_p, ...
    ints: torch.Tensor,  # [num_slots, *] int64: top_k, seed, ...
    *,
    allowed: torch.Tensor | None = None,  # [rows, ceil(vocab / 32)] int32: one bit per token
    draws: bool = True,  # for other devices; here each row's temperature decides
    truncates: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token [rows] int64 and fault [rows] bool of each row: greedy where the temperature is 0.

    A row with NaN, plus infinity or no eligible token is faulted and gets token 0.
    """
    rows, vocab_size = logits.shape
    words = -(-vocab_size // 32)
    tokens = torch.empty(rows, dtype=torch.int64)
    faulted = torch.empty(rows, dtype=torch.bool)
    assert logits.dtype == torch.float32, f"logits are float32, got {logits.dtype}"
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    slots, positions = slots.contiguous(), positions.contiguous()
    assert slots.dtype == positions.dtype == torch.int64, f"{slots.dtype}, {positions.dtype}"
    assert slots.shape == positions.shape == (rows,), f"{slots.shape}, {positions.shape}"
    assert floats.dtype == torch.float32, f"{floats.dtype} parameters"
    assert ints.dtype == torch.int64, f"{ints.dtype} parameters"
    assert len(floats) == len(ints), f"{len(floats)} and {len(ints)} slots"
    assert floats.stride(1) == ints.stride(1) == 1, "a slot's parameters lie together"
    if allowed is not None:
        assert allowed.shape == (rows, words), f"a bit a token, got {tuple(allowed.shape)}"
        allowed = allowed.to(torch.int32).contiguous()
    _choose_tokens(
        logits.data_ptr(), rows, logits.stride(0), vocab_size, slots.data_ptr(), len(floats),
        positions.data_ptr(), floats.data_ptr(), floats.stride(0), ints.data_ptr(), ints.stride(0),
        None if allowed is None else allowed.data_ptr(), words,
        tokens.data_ptr(), faulted.data_ptr(),
    )  # fmt: skip
    return tokens, faulted
