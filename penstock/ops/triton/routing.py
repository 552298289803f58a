"""Routes tokens to experts, and sorts them by expert into token blocks for a matmul."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from penstock.ops.experts import Routing

FEW_PAIRS = 4096  # up to this many are sorted by one program; more take three launches
PAIRS_AT_ONCE = 256


@triton.jit
def _route_kernel(
    logits_ptr, correction_ptr, weight_ptr, id_ptr, num_experts, scale,
    TOP_K: tl.constexpr, SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr,
    CORRECTION: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    TOP_2: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr, GROUP_SLOTS: tl.constexpr,
):  # fmt: skip
    """One program per token. It takes the best expert TOP_K times."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    exists = expert < num_experts
    logits = tl.load(logits_ptr + token * num_experts + expert, mask=exists, other=-float("inf"))
    logits = logits.to(tl.float32)
    if SOFTMAX:
        scores = tl.exp(logits - tl.max(logits, axis=0))
        scores = scores / tl.sum(scores, axis=0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    choice = scores
    if CORRECTION:
        choice += tl.load(correction_ptr + expert, mask=exists, other=0.0)
    # NaN scores rank last: even a row of NaN gets valid ids.
    choice = tl.where(exists & (choice == choice), choice, -float("inf"))
    if GROUPS > 1:
        group = expert // (num_experts // GROUPS)
        group_slot = tl.arange(0, GROUP_SLOTS)
        group_scores = tl.full([GROUP_SLOTS], -float("inf"), tl.float32)
        for index in tl.static_range(GROUPS):
            own = tl.where(group == index, choice, -float("inf"))
            best = tl.max(own, axis=0)
            if TOP_2:
                rest = tl.where(expert == tl.argmax(own, axis=0), -float("inf"), own)
                best += tl.max(rest, axis=0)
            group_scores = tl.where(group_slot == index, best, group_scores)
        eligible = tl.zeros([EXPERTS], tl.int1)
        for _ in tl.static_range(TOP_GROUPS):
            chosen = tl.argmax(group_scores, axis=0)
            eligible = eligible | (group == chosen)
            group_scores = tl.where(group_slot == chosen, -float("inf"), group_scores)
        choice = tl.where(eligible, choice, -float("inf"))
    slot = tl.arange(0, SLOTS)
    ids = tl.zeros([SLOTS], tl.int32)
    weights = tl.zeros([SLOTS], tl.float32)
    for index in tl.static_range(TOP_K):
        best = tl.argmax(choice, axis=0)
        taken = expert == best
        weight = tl.sum(tl.where(taken, scores, 0.0), axis=0)
        choice = tl.where(taken, -float("inf"), choice)
        ids = tl.where(slot == index, best.to(tl.int32), ids)
        weights = tl.where(slot == index, weight, weights)
    if RENORMALIZE:
        weights = weights / tl.maximum(tl.sum(weights, axis=0), 1e-20)
    at = token * TOP_K + slot
    tl.store(weight_ptr + at, weights * scale, mask=slot < TOP_K)
    tl.store(id_ptr + at, ids, mask=slot < TOP_K)


@triton.jit
def _map_blocks(
    count_ptr, start_ptr, block_expert_ptr, block_rows_ptr, num_blocks,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """From the number of pairs of each expert: its first token block, and what each block is."""
    expert = tl.arange(0, EXPERTS)
    counts = tl.load(count_ptr + expert, cache_modifier=".cg")  # written by other threads
    blocks = (counts + ROWS - 1) // ROWS
    starts = tl.cumsum(blocks, axis=0) - blocks
    tl.store(start_ptr + expert, starts)
    for index in range(tl.max(blocks)):
        mask = index < blocks
        tl.store(block_expert_ptr + starts + index, expert, mask=mask)
        rows = tl.minimum(counts - index * ROWS, ROWS)
        tl.store(block_rows_ptr + starts + index, rows, mask=mask)
    for first in range(tl.sum(blocks), num_blocks, EXPERTS):
        block = first + expert
        tl.store(block_rows_ptr + block, 0, mask=block < num_blocks)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _align_kernel(
    id_ptr, count_ptr, start_ptr, pair_ptr, block_expert_ptr, block_rows_ptr,
    num_pairs, num_blocks, num_experts,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Sort few pairs in one program.

    Its threads synchronize at barriers and share data in memory.
    """
    expert = tl.arange(0, EXPERTS)
    tl.store(count_ptr + expert, tl.zeros([EXPERTS], tl.int32))
    pair = tl.arange(0, PAIRS)
    mask = pair < num_pairs
    own = tl.load(id_ptr + pair, mask=mask, other=0)
    mask = mask & (own < num_experts)
    tl.debug_barrier()
    rank = tl.atomic_add(count_ptr + own, 1, mask=mask)
    tl.debug_barrier()
    _map_blocks(count_ptr, start_ptr, block_expert_ptr, block_rows_ptr, num_blocks, ROWS, EXPERTS)
    tl.debug_barrier()
    start = tl.load(start_ptr + own, mask=mask, other=0, cache_modifier=".cg")
    tl.store(pair_ptr + start * ROWS + rank, pair, mask=mask)


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(id_ptr, count_ptr, rank_ptr, num_pairs, num_experts, BLOCK: tl.constexpr):
    """Count the pairs of each expert, and rank each pair among them, in any order."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = pair < num_pairs
    expert = tl.load(id_ptr + pair, mask=mask, other=0)
    mask = mask & (expert < num_experts)
    rank = tl.atomic_add(count_ptr + expert, 1, mask=mask)
    tl.store(rank_ptr + pair, rank, mask=mask)


@triton.jit(do_not_specialize=["num_blocks"])
def _map_kernel(
    count_ptr, start_ptr, block_expert_ptr, block_rows_ptr, num_blocks,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    _map_blocks(count_ptr, start_ptr, block_expert_ptr, block_rows_ptr, num_blocks, ROWS, EXPERTS)


@triton.jit(do_not_specialize=["num_pairs"])
def _place_kernel(
    id_ptr, start_ptr, rank_ptr, pair_ptr, num_pairs, num_experts,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = pair < num_pairs
    expert = tl.load(id_ptr + pair, mask=mask, other=0)
    mask = mask & (expert < num_experts)
    start = tl.load(start_ptr + expert, mask=mask, other=0)
    rank = tl.load(rank_ptr + pair, mask=mask, other=0)
    tl.store(pair_ptr + start * ROWS + rank, pair, mask=mask)


def route(
    logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference. Ties go to the lower expert ids."""
    num_tokens, num_experts = logits.shape
    shape, device = (num_tokens, routing.top_k), logits.device
    weights = torch.empty(shape, dtype=torch.float32, device=device)
    ids = torch.empty(shape, dtype=torch.int32, device=device)
    if num_tokens:
        experts = triton.next_power_of_2(num_experts)
        _route_kernel[(num_tokens,)](
            logits.contiguous(), logits if correction is None else correction, weights, ids,
            num_experts, routing.scale,
            TOP_K=routing.top_k, SOFTMAX=routing.scoring == "softmax",
            RENORMALIZE=routing.renormalize, CORRECTION=correction is not None,
            GROUPS=routing.num_groups, TOP_GROUPS=routing.top_groups,
            TOP_2=routing.group_score == "top2", EXPERTS=experts,
            SLOTS=triton.next_power_of_2(routing.top_k),
            GROUP_SLOTS=triton.next_power_of_2(routing.num_groups), num_warps=1,
        )  # fmt: skip
    return weights, ids


class Blocks(NamedTuple):
    """Pairs of a token and one of its experts, sorted by expert. A token block has one expert."""

    pairs: torch.Tensor  # [num_blocks * rows] int32: token * top_k + slot; undefined in padding
    experts: torch.Tensor  # [num_blocks] int32
    rows: torch.Tensor  # [num_blocks] int32: valid rows; 0 for unused token blocks


def align(ids: torch.Tensor, num_experts: int, rows: int) -> Blocks:
    """Sort ids [n, top_k] into token blocks of `rows`. Allocates as many as they could need.

    The host needs no routing result. The pairs of one expert come in any order, which does not
    affect their results. Ids from `num_experts` on are experts of other ranks: they are left out.
    """
    num_pairs, device = ids.numel(), ids.device
    num_used = min(num_pairs, num_experts)
    num_blocks = num_used + (num_pairs - num_used) // rows
    padded = triton.next_power_of_2(num_experts)
    pairs = torch.empty(num_blocks * rows, dtype=torch.int32, device=device)
    experts, filled = torch.empty((2, num_blocks), dtype=torch.int32, device=device)
    if num_pairs <= FEW_PAIRS:
        counts, starts = torch.empty((2, padded), dtype=torch.int32, device=device)
        _align_kernel[(1,)](
            ids, counts, starts, pairs, experts, filled, num_pairs, num_blocks, num_experts,
            ROWS=rows, PAIRS=max(triton.next_power_of_2(num_pairs), 512), EXPERTS=padded,
            num_warps=16,
        )  # fmt: skip
        return Blocks(pairs, experts, filled)
    counts, starts = torch.zeros((2, padded), dtype=torch.int32, device=device)
    ranks = torch.empty(num_pairs, dtype=torch.int32, device=device)
    grid = (triton.cdiv(num_pairs, PAIRS_AT_ONCE),)
    _count_kernel[grid](ids, counts, ranks, num_pairs, num_experts, BLOCK=PAIRS_AT_ONCE)
    _map_kernel[(1,)](counts, starts, experts, filled, num_blocks, ROWS=rows, EXPERTS=padded)
    _place_kernel[grid](
        ids, starts, ranks, pairs, num_pairs, num_experts, ROWS=rows, BLOCK=PAIRS_AT_ONCE
    )
    return Blocks(pairs, experts, filled)
