"""Triton's ops for logits that are sharded over the vocabulary (`penstock.ops.sharded_sampling`).

They use the kernels that choose tokens from whole rows, so the tokens are the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.ops.random import TOKENS_PER_CALL
from penstock.ops.triton.sampling import (
    CHUNK,
    _best_kernel,
    _cutoff_kernel,
    _draw_kernel,
    _row_best,
)


@triton.jit
def _winner_kernel(
    value_ptr, index_ptr, best_ptr, column_ptr, num_chunks, CHUNKS: tl.constexpr
):  # fmt: skip
    """The winner among a row's chunks. Ties go to the lower column."""
    row = tl.program_id(0)
    best, chunk = _row_best(value_ptr, row, num_chunks, CHUNKS)
    tl.store(best_ptr + row, best)
    tl.store(column_ptr + row, tl.load(index_ptr + row * num_chunks + chunk))


def _winners(values: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and columns [rows, num_chunks] -> the best [rows] and its column [rows]."""
    num_rows, num_chunks = values.shape
    best, column = values.new_empty(num_rows), index.new_empty(num_rows)
    chunks = max(triton.next_power_of_2(num_chunks), 2)
    _winner_kernel[(num_rows,)](values, index, best, column, num_chunks, CHUNKS=chunks, num_warps=1)
    return best, column


def best_of_share(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference."""
    num_rows, num_tokens = logits.shape
    num_chunks = triton.cdiv(num_tokens, CHUNK)
    values = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    index = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    _best_kernel[(num_rows, num_chunks)](
        logits, values, index, logits.stride(0), num_tokens, num_chunks, CHUNK=CHUNK, num_warps=8
    )
    return _winners(values, index)


def shared_cutoff(
    tops: torch.Tensor,  # [rows, ranks, k + 1]
    slots: torch.Tensor,
    floats: torch.Tensor,
    ints: torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
    """As the reference, with the masses of the kernel for whole rows."""
    num_rows, ranks, _ = tops.shape
    kept = tops[..., :-1].flatten(1).contiguous()
    last, ties = tops[..., -2].contiguous(), tops[..., -1].contiguous()
    num_kept = torch.full((num_rows,), kept.shape[1], dtype=torch.int32, device=tops.device)
    totals = torch.zeros((num_rows, 1), dtype=torch.int64, device=tops.device)  # without top_k
    cutoff = torch.empty(num_rows, dtype=torch.float32, device=tops.device)
    _cutoff_kernel[(num_rows,)](
        slots, floats, ints, totals, kept, num_kept, cutoff, last, ties, kept.shape[1],
        vocab_size, 1, floats.stride(0), ints.stride(0), ranks,
        RANKS=triton.next_power_of_2(ranks), CHUNKS=2, BLOCK=256, num_warps=4,
    )  # fmt: skip
    return cutoff


def draw_from_share(
    logits: torch.Tensor,
    best: torch.Tensor,
    cutoff: torch.Tensor | None,
    slots: torch.Tensor,
    positions: torch.Tensor,
    floats: torch.Tensor,
    ints: torch.Tensor,
    first: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference. Rows that do not draw give anything."""
    num_rows, num_tokens = logits.shape
    shift = first % TOKENS_PER_CALL
    num_chunks = triton.cdiv(num_tokens + shift, CHUNK)
    scores = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    index = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    bests = best[:, None].expand(-1, num_chunks).contiguous()
    _draw_kernel[(num_rows, num_chunks)](
        logits, slots, positions, floats, ints, bests, best if cutoff is None else cutoff, slots,
        scores, index, logits.stride(0), num_tokens, num_chunks, floats.stride(0), ints.stride(0),
        first, CUTOFF=cutoff is not None, MAPPED=False, SHIFT=shift,
        CHUNKS=max(triton.next_power_of_2(num_chunks), 2), CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    return _winners(scores, index)
