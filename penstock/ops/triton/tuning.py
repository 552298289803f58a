"""Kernel configurations: the one place for numbers that were found by measuring on an H200.

Nothing is searched for at run time. On other GPUs these are correct, perhaps not the fastest.
"""

from __future__ import annotations

from typing import NamedTuple


class Launch(NamedTuple):
    """How a kernel is compiled."""

    num_warps: int
    num_stages: int


class DecodeTile(NamedTuple):
    """Attention of single tokens: cached tokens a step of the loop, and the launch."""

    tokens: int
    launch: Launch


class PrefillTile(NamedTuple):
    """Attention of longer queries: rows (tokens times grouped heads) by cached tokens."""

    rows: int
    tokens: int
    launch: Launch


DECODE_PROGRAMS = 132 * 4  # enough to fill the chip: fewer requests split their cache further
MAX_SPLITS = 32


def decode_tile(head_dim: int, element_size: int) -> DecodeTile:
    if element_size == 4 or head_dim > 128:
        return DecodeTile(32, Launch(4, 2))
    return DecodeTile(64, Launch(4, 3))


def prefill_tile(head_dim: int, element_size: int) -> PrefillTile:
    if element_size == 4 or head_dim > 128:
        return PrefillTile(64, 32, Launch(4, 2))
    return PrefillTile(128, 64, Launch(8, 3))


def decode_splits(num_requests: int, num_kv_heads: int) -> int:
    """A power of two: into how many parts each request's cache is split."""
    splits = 1
    while splits < MAX_SPLITS and num_requests * num_kv_heads * splits * 2 <= DECODE_PROGRAMS * 2:
        splits *= 2
    return splits
