"""Kernel configurations of quantized weights, found on an H200 like those of tuning.py."""

from __future__ import annotations

from typing import NamedTuple

from penstock.ops.triton.tuning import ExpertsPlan, ExpertsTile, Launch, RowTile

PROCESSORS = 132


class Fp8Plan(NamedTuple):
    """A matmul of fp8: rows of the weight by rows of x, columns a step, programs a tile."""

    rows: int
    tokens: int
    depth: int
    splits: int
    swap: bool  # weights as the left operand, which the tensor cores want in 64s
    precise: bool  # sums of more than a step in float32, not in the tensor cores' own precision
    launch: Launch


class W4Plan(NamedTuple):
    """A matmul with weights of 4 bits: rows of the weight by rows of x, programs a tile."""

    rows: int
    tokens: int
    splits: int
    launch: Launch


def fp8_row_tile(blocked: bool) -> RowTile:
    """One row of x with fp8 weights."""
    return RowTile(4, 1024, Launch(4, 3)) if blocked else RowTile(8, 1024, Launch(4, 3))


def fp8_plan(
    num_tokens: int, out_features: int, in_features: int, own_kernel: bool
) -> Fp8Plan | None:
    """None: torch's scaled matmul is faster, unless our own kernel is what there is."""
    if num_tokens > 64:
        return Fp8Plan(128, 128, 128, 1, False, True, Launch(8, 3)) if own_kernel else None
    tokens = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
    if out_features >= 2 * 64 * PROCESSORS:
        return Fp8Plan(64, tokens, 128, 1, True, True, Launch(4, 4))
    # Few tiles: a program for each processor, with as much on its way as there is room for.
    splits = 1 if in_features < 8192 else 4 if tokens == 16 else 2
    return Fp8Plan(64, tokens, 256, splits, True, True, Launch(4, 5))


def w4_row_tile(in_features: int) -> RowTile:
    """One row of x with weights of 4 bits; columns in words of 8."""
    return RowTile(4, 256, Launch(2, 3))


def _splits(num_tiles: int, in_features: int) -> int:
    """As many programs as fill the chip twice, of at least 1,024 columns each."""
    splits = 1
    while splits * num_tiles < 2 * PROCESSORS and in_features // (2 * splits) >= 1024:
        splits *= 2
    return splits


def w4_plan(num_tokens: int, out_features: int, in_features: int) -> W4Plan | None:
    """None: weights become floats, a slab of them at a time, for cuBLAS."""
    if num_tokens > 128:
        return None
    tokens = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
    return W4Plan(64, tokens, _splits(out_features // 64, in_features), Launch(4, 3))


def quantized_experts_plan(num_pairs: int, num_experts: int) -> ExpertsPlan:
    """By how many (token, expert) pairs an expert has on average."""
    per_expert = num_pairs / num_experts
    rows = 16 if per_expert <= 8 else 32 if per_expert <= 20 else 64
    tile = ExpertsTile(64, 128, True, 1 if rows == 16 else 4, Launch(4, 3))
    return ExpertsPlan(rows, tile, tile)
