"""Kernels launched while the previous one still runs (programmatic dependent launch).

At one token per step, memory is idle between kernels and during small ones. Therefore a kernel lets
its successor start at once. It waits until everything before it is finished before it touches data
that other kernels write, or writes data that they read. A product with 4-bit weights loads its
first weights before it waits. All programs of a kernel must wait, even those without work: the end
of a kernel implies the end of everything before it.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """Before `wait_for_others`, a kernel may load weights, but no data written recently."""
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
    """Launch keywords for a kernel that starts with one of the functions above."""
    if device.type == "cuda" and _can_overlap(device):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


@functools.cache
def _can_overlap(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
