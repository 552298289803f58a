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


class LatentDecodePlan(NamedTuple):
    """The same as DecodePlan, of latent attention: also how many heads a program has."""

    rows: int
    tile: int
    splits: int
    min_tiles: int
    launch: Launch


class RowTile(NamedTuple):
    """A matrix with one row of x: rows and columns of the matrix at once."""

    rows: int
    columns: int
    launch: Launch


class ExpertsTile(NamedTuple):
    """A matmul of one expert's rows: columns of its output, and inputs a step of the loop."""

    columns: int
    depth: int
    swap: bool  # weights as the left operand, which the tensor cores want in 64s
    group: int  # blocks of rows whose programs follow each other
    launch: Launch


class ExpertsPlan(NamedTuple):
    """Experts over tokens that are sorted by expert in blocks of `rows`."""

    rows: int
    gate_up: ExpertsTile
    down: ExpertsTile


PROCESSORS = 132  # of an H200
SHORT_QUERY, LONG_QUERY = 1024, 2048
FEW_TOKENS = 2  # experts: up to here nearly every weight is read for one token alone


def decode_plan(
    head_dim: int, element_size: int, num_requests: int, num_kv_heads: int
) -> DecodePlan:
    programs = num_requests * num_kv_heads  # if no cache were split; 132 processors wait for them
    if element_size == 4 or head_dim > 128:
        return DecodePlan(32, 32 if programs <= 32 else 4, 4, Launch(4, 2))
    if programs <= 32:
        return DecodePlan(32, 32, 1, Launch(4, 2))
    if programs <= 128:
        return DecodePlan(64, 8, 4, Launch(2, 3))
    # Many requests fill the chip as they are; the longest are split so as not to be the last.
    return DecodePlan(64, 4, 8 if programs <= 1024 else 16, Launch(2, 3))


def prefill_tile(head_dim: int, element_size: int, max_query_len: int) -> PrefillTile:
    if element_size == 4 or head_dim > 128:
        return PrefillTile(64, 32, Launch(4, 2))
    if max_query_len < LONG_QUERY:
        return PrefillTile(64, 32, Launch(4, 2))
    return PrefillTile(128, 64, Launch(4, 2))


def prompt_tile(element_size: int, max_query_len: int) -> PrefillTile:
    """The same, of prompts whose keys and values lie side by side."""
    if element_size == 4:
        return PrefillTile(64, 32, Launch(4, 2))
    if max_query_len < LONG_QUERY:
        return PrefillTile(64, 32 if max_query_len < SHORT_QUERY else 64, Launch(4, 3))
    return PrefillTile(128, 64, Launch(4, 2))


def latent_decode_plan(num_heads: int, element_size: int, num_requests: int) -> LatentDecodePlan:
    # Few programs: less work each. Many: a latent vector should be read once for many heads.
    few = num_requests * num_heads <= 1024
    rows = 16
    while rows < num_heads and rows < (16 if few or element_size == 4 else 64):
        rows *= 2
    programs = num_requests * -(-num_heads // rows)
    splits = 1
    while splits < 32 and programs * splits < 192:
        splits *= 2
    if element_size == 4:
        return LatentDecodePlan(rows, 16, splits, 4, Launch(4, 1))
    tile = 64 if rows == 64 or few else 32
    return LatentDecodePlan(
        rows, tile, splits, 2, Launch(8 if rows == 64 or programs <= 4 else 4, 2)
    )


def latent_prefill_tile(element_size: int) -> PrefillTile:
    """Absorbed: rows are tokens by heads."""
    if element_size == 4:
        return PrefillTile(16, 16, Launch(4, 1))
    return PrefillTile(64, 64, Launch(8, 2))


def latent_prompt_tile(element_size: int, head_dim: int) -> PrefillTile:
    """Expanded: rows are tokens. `head_dim` is the larger of key and value, padded."""
    if element_size == 4 or head_dim > 128:
        return PrefillTile(32 if element_size == 4 else 64, 32, Launch(4, 2))
    return PrefillTile(128, 64, Launch(8, 3))


def row_tile(in_features: int) -> RowTile:
    return RowTile(2, 2048, Launch(2, 3)) if in_features >= 2048 else RowTile(4, 1024, Launch(2, 3))


def is_few_tokens(num_tokens: int) -> bool:
    """Whether experts are computed token by token."""
    return num_tokens <= FEW_TOKENS


def few_experts_tiles() -> tuple[RowTile, RowTile]:
    """Of gate and up, of which as many rows each are read at once, and of down."""
    tile = RowTile(4, 1024, Launch(2, 3))
    return tile, tile


def experts_plan(num_pairs: int, num_experts: int, element_size: int) -> ExpertsPlan:
    """By how many (token, expert) pairs an expert has on average."""
    if element_size == 4:
        tile = ExpertsTile(32, 32, False, 8, Launch(4, 2))
        return ExpertsPlan(16, tile, tile)
    per_expert = num_pairs / num_experts
    # Few: each expert's weights should be read once, and fast.
    launch = Launch(4, 3)
    if per_expert <= 8:
        return ExpertsPlan(
            16, ExpertsTile(64, 128, True, 1, launch), ExpertsTile(128, 128, False, 1, launch)
        )
    if per_expert <= 20:
        return ExpertsPlan(
            32, ExpertsTile(64, 128, False, 4, launch), ExpertsTile(128, 128, False, 4, launch)
        )
    if per_expert <= 128:
        return ExpertsPlan(
            64, ExpertsTile(64, 64, False, 4, launch), ExpertsTile(128, 64, False, 4, launch)
        )
    # Many: the tensor cores should be busy.
    launch = Launch(8, 4)
    return ExpertsPlan(
        128, ExpertsTile(128, 64, False, 4, launch), ExpertsTile(256, 64, False, 4, launch)
    )
