"""Kernel configurations for quantized weights, measured on an H200 like those of tuning.py."""

from __future__ import annotations

from typing import NamedTuple

from penstock.ops.triton.tuning import PROCESSORS, ExpertsPlan, ExpertsTile, Launch, RowTile


class Fp8Plan(NamedTuple):
    """An fp8 matmul: rows of the weight by rows of x, columns per step, programs per tile."""

    rows: int
    tokens: int
    depth: int
    splits: int
    swap: bool  # weights as the left operand, where the tensor cores need multiples of 64
    precise: bool  # sums beyond one step in float32, not in the tensor cores' precision
    launch: Launch


class TilePlan(NamedTuple):
    """A matmul with 4-bit or 8-bit weights: rows of the weight by rows of x, programs per tile."""

    rows: int
    tokens: int
    splits: int
    launch: Launch


def fp8_row_tile(out_features: int, blocked: bool) -> RowTile:
    """One row of x with fp8 weights."""
    if blocked:
        return RowTile(4, 2048, Launch(4, 3))
    return RowTile(4, 4096 if out_features >= 16384 else 2048, Launch(4, 3))


def takes_own_kernel(num_tokens: int) -> bool:
    """Whether our kernel is faster than torch's scaled matmul."""
    return num_tokens <= 64


def fp8_plan(num_tokens: int, out_features: int, in_features: int, blocked: bool) -> Fp8Plan:
    """`blocked`: one scale per 128 columns, which then are a step."""
    if num_tokens > 64:
        return Fp8Plan(128, 128, 128, 1, False, True, Launch(8, 3))
    tokens = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
    if blocked:
        splits = 1  # enough programs to fill the chip twice, with at least 1,024 columns each
        while splits * (out_features // 64) < 2 * PROCESSORS and in_features >= 2048 * splits:
            splits *= 2
        return Fp8Plan(64, tokens, 128, splits, True, True, Launch(4, 4))
    if out_features >= 2 * 64 * PROCESSORS:
        return Fp8Plan(64, tokens, 128, 1, True, True, Launch(4, 4))
    # Few tiles: one program per SM, with as many loads in flight as fit.
    splits = 1 if in_features < 8192 else 4 if tokens == 16 else 2
    return Fp8Plan(64, tokens, 256, splits, True, True, Launch(4, 5))


def w4_row_warps(out_features: int, num_chunks: int) -> int:
    """One row of x with 4-bit weights: warps, of eight chunks each, that share 16 rows."""
    if out_features >= 16384:
        return 1
    warps = 1
    while warps < 4 and warps * 8 < num_chunks:
        warps *= 2
    return warps


def w4_plan(
    num_tokens: int, out_features: int, in_features: int, element_size: int
) -> TilePlan | None:
    """None: dequantize slabs of the weight for cuBLAS."""
    if num_tokens > 128:
        return None
    tokens = _tile_tokens(num_tokens, element_size)
    rows = 128 if out_features >= 128 * PROCESSORS and element_size < 4 else 64
    # Programs that share a tile have at least 512 columns each.
    splits, programs = 1, -(-out_features // rows) * -(-num_tokens // tokens)
    while splits < 4 and splits * programs < (256 if tokens <= 32 else 192):
        if in_features < 1024 * splits:
            break
        splits *= 2
    warps = 8 if rows == 128 and num_tokens > 64 else 4
    return TilePlan(rows, tokens, splits, Launch(warps, _num_stages(element_size)))


def byte_plan(
    num_tokens: int, out_features: int, in_features: int, element_size: int
) -> TilePlan | None:
    """`w4_plan` for 8-bit weights, or weights from a table."""
    if num_tokens > 128:
        return None
    tokens = _tile_tokens(num_tokens, element_size)
    # Programs that share a tile have at least 1,024 columns each.
    splits, programs = 1, -(-out_features // 64) * -(-num_tokens // tokens)
    while splits * programs < 2 * PROCESSORS and in_features >= 2048 * splits:
        splits *= 2
    return TilePlan(64, tokens, splits, Launch(4, _num_stages(element_size)))


def quantized_experts_plan(num_pairs: int, num_experts: int, element_size: int) -> ExpertsPlan:
    """Chosen by the average number of pairs per expert. `element_size`: of the multiplied type."""
    launch = Launch(4, _num_stages(element_size))
    if element_size == 4:
        return ExpertsPlan(
            16, ExpertsTile(32, 128, True, 1, launch), ExpertsTile(64, 128, True, 1, launch)
        )
    per_expert = num_pairs / num_experts
    rows = 16 if per_expert <= 8 else 32 if per_expert <= 20 else 64
    tile = ExpertsTile(64, 128, True, 1 if rows == 16 else 4, launch)
    return ExpertsPlan(rows, tile, tile)


def _tile_tokens(num_tokens: int, element_size: int) -> int:
    """Float32 does not use the tensor cores, and a larger tile takes too many instructions."""
    if element_size == 4 or num_tokens <= 16:
        return 16
    return 32 if num_tokens <= 32 else 64


def _num_stages(element_size: int) -> int:
    """With float32, fewer chunks in flight fill the shared memory."""
    return 2 if element_size == 4 else 3
