"""Kernel configurations: the one place for numbers that were found by measuring on an H200.

Nothing is searched for at run time. On other GPUs these are correct, perhaps not the fastest.
"""

from __future__ import annotations

from typing import NamedTuple


class Launch(NamedTuple):
    """How a kernel is compiled."""

    num_warps: int
    num_stages: int


class DecodePlan(NamedTuple):
    """Attention of single tokens: how a request's cache is divided among programs."""

    tile: int  # cached tokens a step of the loop
    splits: int  # most parts; a power of two
    min_tiles: int  # of a part
    launch: Launch


class PrefillTile(NamedTuple):
    """Attention of longer queries: rows (tokens times grouped heads) by cached tokens."""

    rows: int
    tokens: int
    launch: Launch


class RowTile(NamedTuple):
    """A matrix with one row of x: rows and columns of the matrix at once."""

    rows: int
    columns: int
    launch: Launch


FULL_CHIP = 132 * 4  # programs: with fewer, requests split their cache further
LONG_QUERY = 2048


def decode_plan(
    head_dim: int, element_size: int, num_requests: int, num_kv_heads: int
) -> DecodePlan:
    splits = FULL_CHIP // (num_requests * num_kv_heads)
    wide = element_size == 4 or head_dim > 128
    if splits >= 2:  # few requests: every part is wanted to fill the chip
        splits = min(2 ** (splits.bit_length() - 1), 32)
        return DecodePlan(32, splits, 1 if splits > 8 else 4, Launch(4, 2))
    # Many requests fill the chip as they are; the longest are split so as not to be the last.
    return DecodePlan(32, 4, 16, Launch(4, 2)) if wide else DecodePlan(64, 4, 8, Launch(2, 3))


def prefill_tile(head_dim: int, element_size: int, max_query_len: int) -> PrefillTile:
    if element_size == 4 or head_dim > 128:
        return PrefillTile(64, 32, Launch(4, 2))
    if max_query_len < LONG_QUERY:
        return PrefillTile(64, 32, Launch(4, 2))
    return PrefillTile(128, 64, Launch(4, 2))


def row_tile(in_features: int) -> RowTile:
    return RowTile(2, 2048, Launch(2, 3)) if in_features >= 2048 else RowTile(4, 1024, Launch(2, 3))
