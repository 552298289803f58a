"""Kernel configurations: the one place for numbers measured on an H200.

There is no search at run time. On other GPUs these are correct, but maybe not the fastest.
"""

from __future__ import annotations

from typing import NamedTuple


class Launch(NamedTuple):
    """The compile options of a kernel."""

    num_warps: int
    num_stages: int


class DecodePlan(NamedTuple):
    """Attention of decodes: how a request's cache is split among programs."""

    tile: int  # cached tokens per loop step
    splits: int  # maximum number of splits; a power of two
    min_tiles: int  # minimum tiles of a split
    launch: Launch


class PrefillTile(NamedTuple):
    """Attention of longer queries: rows (tokens times grouped heads) by cached tokens."""

    rows: int
    tokens: int
    launch: Launch


class LatentDecodePlan(NamedTuple):
    """`DecodePlan` of latent attention, with the number of heads per program."""

    rows: int
    tile: int
    splits: int
    min_tiles: int
    launch: Launch


class RowTile(NamedTuple):
    """A matrix times one row of x: rows and columns of the matrix processed at once."""

    rows: int
    columns: int
    launch: Launch


class FewRowsTile(NamedTuple):
    """A matrix times a few rows of x: rows of the matrix per program, and inputs per loop step."""

    columns: int
    depth: int
    launch: Launch


class ExpertsTile(NamedTuple):
    """A matmul of one expert's rows: output columns, and inputs per loop step."""

    columns: int
    depth: int
    swap: bool  # weights as the left operand, where the tensor cores need multiples of 64
    group: int  # token blocks whose programs are adjacent
    launch: Launch


class ExpertsPlan(NamedTuple):
    """Experts over tokens sorted by expert, in token blocks of `rows`."""

    rows: int
    gate_up: ExpertsTile
    down: ExpertsTile


class LoraShrinkPlan(NamedTuple):
    """x A^T of a tile of rows."""

    depth: int  # inputs per loop step
    splits: int  # programs that share a tile's inputs
    launch: Launch


class LoraExpandTile(NamedTuple):
    columns: int  # outputs per program
    launch: Launch


PROCESSORS = 132  # SMs of an H200
SHORT_QUERY, LONG_QUERY = 1024, 2048
MAX_FEW_ROWS = 16  # of x: up to this many, a matmul takes the time to read the matrix
FEW_TOKENS = 2  # up to this many, nearly every weight read serves a single token


def decode_group_rows(head_dim: int, element_size: int, group: int, num_queries: int) -> int | None:
    """Rows of a tile for each token of a decode, whose key heads serve `group` heads each.

    Tensor cores need 16 rows in all. None: a tile cannot hold this many tokens.
    """
    rows = max(1 << (group - 1).bit_length(), 16 // num_queries)
    num_rows = num_queries * rows
    fits = num_rows <= 128 and num_rows * head_dim * element_size <= 2**16
    return rows if num_queries == 1 or fits else None


def decode_plan(
    head_dim: int,
    element_size: int,
    num_requests: int,
    num_kv_heads: int,
    num_queries: int = 1,
    group_rows: int = 16,
) -> DecodePlan:
    plan = _decode_plan(head_dim, element_size, num_requests, num_kv_heads)
    num_rows = num_queries * group_rows
    if num_queries == 1 or num_rows <= 16:
        return plan
    return plan._replace(launch=Launch(4 if num_rows <= 64 else 8, 2))


def _decode_plan(
    head_dim: int, element_size: int, num_requests: int, num_kv_heads: int
) -> DecodePlan:
    programs = num_requests * num_kv_heads  # without splits; 132 SMs need work
    if element_size == 4 or head_dim > 128:
        return DecodePlan(32, 32 if programs <= 32 else 4, 4, Launch(4, 2))
    if programs <= 32:
        return DecodePlan(32, 32, 1, Launch(4, 2))
    if programs <= 128:
        return DecodePlan(64, 8, 4, Launch(2, 3))
    # Many requests fill the chip unsplit. The longest are split so that they do not finish last.
    return DecodePlan(64, 4, 8 if programs <= 1024 else 16, Launch(2, 3))


def prefill_tile(head_dim: int, element_size: int, max_query_len: int) -> PrefillTile:
    if element_size == 4 or head_dim > 128:
        return PrefillTile(64, 32, Launch(4, 2))
    if max_query_len < LONG_QUERY:
        return PrefillTile(64, 32, Launch(4, 2))
    return PrefillTile(128, 64, Launch(4, 2))


def prompt_tile(element_size: int, max_query_len: int) -> PrefillTile:
    """For prompts whose keys and values are contiguous."""
    if element_size == 4:
        return PrefillTile(64, 32, Launch(4, 2))
    if max_query_len < LONG_QUERY:
        return PrefillTile(64, 32 if max_query_len < SHORT_QUERY else 64, Launch(4, 3))
    return PrefillTile(128, 64, Launch(4, 2))


def varlen_tile(element_size: int, head_dim: int, num_rows: int, num_heads: int) -> PrefillTile:
    """For texts of encoders."""
    if element_size == 4 or head_dim > 128:
        return PrefillTile(64, 32, Launch(4, 2))
    if num_rows // 128 * num_heads < 2 * PROCESSORS:
        return PrefillTile(64, 64, Launch(4, 3))
    return PrefillTile(128, 64, Launch(8, 3))


def latent_decode_plan(num_heads: int, element_size: int, num_requests: int) -> LatentDecodePlan:
    # Few programs: less work each. Many: read a latent vector once for many heads.
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
    """Absorbed form: rows are tokens by heads."""
    if element_size == 4:
        return PrefillTile(16, 16, Launch(4, 1))
    return PrefillTile(64, 64, Launch(8, 2))


def latent_prompt_tile(element_size: int, head_dim: int) -> PrefillTile:
    """Expanded form: rows are tokens. `head_dim` is the larger of key and value, padded."""
    if element_size == 4 or head_dim > 128:
        return PrefillTile(32 if element_size == 4 else 64, 32, Launch(4, 2))
    return PrefillTile(128, 64, Launch(8, 3))


def row_tile(in_features: int) -> RowTile:
    return RowTile(2, 2048, Launch(2, 3)) if in_features >= 2048 else RowTile(4, 1024, Launch(2, 3))


def few_rows_tile(out_features: int) -> FewRowsTile:
    """Few programs need a deep pipeline each. If all run at once, shallow ones balance better."""
    programs = -(-out_features // 64)
    if programs <= PROCESSORS:
        return FewRowsTile(64, 256, Launch(4, 4 if programs <= PROCESSORS // 2 else 3))
    is_uneven = 3 * PROCESSORS < programs <= 8 * PROCESSORS  # the last ones would run alone
    return FewRowsTile(64, 128, Launch(4, 6 if is_uneven else 3))


def is_few_tokens(num_tokens: int) -> bool:
    """Whether experts are computed token by token."""
    return num_tokens <= FEW_TOKENS


def few_experts_tiles() -> tuple[RowTile, RowTile]:
    """For gate and up, which are read in equal numbers of rows, and for down."""
    tile = RowTile(4, 1024, Launch(2, 3))
    return tile, tile


def experts_plan(num_pairs: int, num_experts: int, element_size: int) -> ExpertsPlan:
    """Chosen by the average number of (token, expert) pairs per expert."""
    if element_size == 4:
        tile = ExpertsTile(32, 32, False, 8, Launch(4, 2))
        return ExpertsPlan(16, tile, tile)
    per_expert = num_pairs / num_experts
    # Few: read each expert's weights once, and fast.
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
    # Many: keep the tensor cores busy.
    launch = Launch(8, 4)
    return ExpertsPlan(
        128, ExpertsTile(128, 64, False, 4, launch), ExpertsTile(256, 64, False, 4, launch)
    )


def lora_rows(num_rows: int) -> int:
    """Rows of one adapter in a tile."""
    if num_rows == 1:
        return 1
    return 16 if num_rows <= 128 else 32 if num_rows <= 512 else 64


def lora_joined_rows() -> int:
    """Up to this many, memory limits a layer's product: it multiplies with A as well."""
    return 256


def lora_shrink_plan(
    num_programs: int, in_features: int, tile_rows: int, ranks: int, element_size: int
) -> LoraShrinkPlan:
    """`num_programs` is the number of tiles times parts."""
    if tile_rows <= 16 and ranks <= 16 and element_size == 2:
        # All inputs of a program at once: no load waits for another.
        depth = 512 if tile_rows == 1 and in_features <= 8192 else 1024
        if num_programs * -(-in_features // depth) <= 4 * PROCESSORS:
            return LoraShrinkPlan(depth, -(-in_features // depth), Launch(4, 2))
    depth = (1 << 14) // element_size // (ranks + tile_rows)
    depth = min(1 << depth.bit_length() - 1, 128)
    splits, num_steps = 1, -(-in_features // depth)
    while splits < 16 and 2 * splits <= num_steps and num_programs * splits < 2 * PROCESSORS:
        splits *= 2
    return LoraShrinkPlan(depth, splits, Launch(4, 3))


def lora_expand_tile(num_outputs: int, tile_rows: int, ranks: int) -> LoraExpandTile:
    """For a layer with this many outputs over all tiles of rows."""
    if tile_rows == 1 or (tile_rows == 16 and ranks == 16):
        return LoraExpandTile(128, Launch(1, 1))
    columns = 64
    while columns < (256 if ranks <= 32 else 128) and num_outputs // columns > 2 * PROCESSORS:
        columns *= 2
    return LoraExpandTile(columns, Launch(4, 1))
