"""Split-K matmuls: programs share an output tile, and the last one to finish adds the parts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def add_parts(
    acc,  # [A, B] float32, the part of this program
    partial_ptr,  # [SPLITS, ...] float32; [A, B] of each at `offset`
    arrived_ptr,  # int32, zero before and after
    offset, stride, mask, split, SPLITS: tl.constexpr,
):  # fmt: skip
    """The sum of all parts, and whether this program holds it. The order of the sum is fixed."""
    tl.store(partial_ptr + split * stride + offset, acc, mask=mask)
    tl.debug_barrier()  # the whole program has written before one thread reports it
    is_last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        acc = tl.zeros_like(acc)
        # Other programs' writes are in the L2 cache, maybe not in this SM's L1 cache.
        for part in tl.static_range(SPLITS):
            acc += tl.load(
                partial_ptr + part * stride + offset, mask=mask, other=0.0, cache_modifier=".cg"
            )
        tl.store(arrived_ptr, 0)
    return acc, is_last


def room_for_parts(
    out: torch.Tensor,  # [n, out]
    grid: tuple[int, int, int],  # tiles, tiles, and programs per tile
) -> tuple[torch.Tensor, torch.Tensor]:
    """`partial_ptr` and `arrived_ptr` for `add_parts`; placeholders if no tile is shared."""
    if grid[2] == 1:
        return out, out
    partial = torch.empty((grid[2], *out.shape), dtype=torch.float32, device=out.device)
    arrived = torch.zeros(grid[0] * grid[1], dtype=torch.int32, device=out.device)
    return partial, arrived
