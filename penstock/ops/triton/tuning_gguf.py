"""Kernel configurations for GGUF weights, measured on an H200 like those of tuning.py."""

from __future__ import annotations

from typing import NamedTuple

from penstock.ops.triton.gguf_layout import LAYOUTS, Layout
from penstock.ops.triton.tuning import PROCESSORS, Launch


class RowPlan(NamedTuple):
    """One row of x: quads of the weight at once, and how many times four rows in sequence."""

    quads: int
    steps: int  # 1 if rows have more quads
    launch: Launch


class TensorPlan(NamedTuple):
    """One row of x on the tensor cores: warps that share 16 rows of the weight."""

    warps: int
    turns: int  # times eight sub-blocks that a warp loads at once
    registers: int | None  # per thread


def most_single_rows(layout: Layout, tensor_cores: bool) -> int:
    """How many rows of x are multiplied one by one. More are faster when dequantized.

    On the tensor cores, five rows take as long as dequantizing for types with more than four bits,
    and six to seven rows for four bits. Of the other types, five rows of Q8_0 break even; the rest
    are not measured.
    """
    if not tensor_cores:
        return 4
    return 5 if layout.high else 6


def row_plan(type_name: str, out_features: int, in_features: int) -> RowPlan:
    """One row of x with weights of this type. A thread holds a quad of each row."""
    layout = LAYOUTS[type_name]
    quads = 32
    while quads < 128 and quads * 128 < in_features * layout.low:
        quads *= 2
    if quads * 128 < in_features * layout.low:
        return RowPlan(64, 1, Launch(2, 3))
    steps = 2 if layout.low + layout.high <= 4 and out_features >= 4096 else 1
    return RowPlan(quads, steps, Launch(quads // 32, 3))


def tensor_plan(group: int, out_features: int, in_features: int) -> TensorPlan:
    """One row of x with weights of 4 to 6 bits. All programs run at once, if possible."""
    programs = -(-out_features // 16)
    most, turns, registers = 8, 1, 80  # three programs per SM
    if programs > 3 * PROCESSORS:
        most = 4
    elif programs <= 2 * PROCESSORS:
        turns, registers = (1, 96) if group == 32 else (2, 128)
    warps = 1
    while warps < most and warps * 8 * group < in_features:
        warps *= 2
    return TensorPlan(warps, turns, registers)


class GgufExpertsPlan(NamedTuple):
    """One expert's rows by a token block, quads per step, adjacent token blocks."""

    rows: int
    tokens: int
    quads: int
    group: int
    launch: Launch


def gguf_experts_plan(num_pairs: int, num_experts: int, element_size: int) -> GgufExpertsPlan:
    """Chosen by the average number of (token, expert) pairs per expert."""
    per_expert = num_pairs / num_experts
    tokens = 16 if per_expert <= 8 or element_size == 4 else 32 if per_expert <= 20 else 64
    return GgufExpertsPlan(
        64, tokens, 8, 1 if tokens == 16 else 4, Launch(4, 2 if element_size == 4 else 3)
    )
