"""Measures how much of a GPU's memory a computation needs."""

from __future__ import annotations

from collections.abc import Callable

import torch


@torch.inference_mode()
def peak_bytes(device: torch.device, compute: Callable[[], None]) -> int:
    """The most bytes that are allocated during `compute`, beyond those before it."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    compute()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak
