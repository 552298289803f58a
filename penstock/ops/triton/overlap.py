"""Kernels that are launched while the one before them still runs (programmatic dependent launch).

At one token a step, memory rests between kernels and while small ones run. So a kernel lets its
successor start at once, and itself waits until everything before it is finished, before it reads or
writes what others write or read. A product with 4-bit weights loads its first before it waits. All
programs of a kernel must wait, also those with nothing to do: a kernel that has ended stands for
everything before it.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """Before `wait_for_others`, a kernel may load weights: nothing else that was written lately."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait_for_others(OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_wait()


@triton.jit
def begin(OVERLAP: tl.constexpr):
    """The first line of a kernel that loads nothing before it waits."""
    let_next_start(OVERLAP)
    wait_for_others(OVERLAP)


def overlap(device: torch.device) -> dict[str, bool]:
    """Keywords of a launch: of a kernel that begins as above."""
    if device.type == "cuda" and _can_overlap(device):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


@functools.cache
def _can_overlap(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
