"""Compiles the kernels of decodes with drafts for a Hopper GPU, without one.

python compile_verification.py KERNEL...    prints what is in the code of each, as JSON; none: all
"""

from __future__ import annotations

import json
import sys
from typing import Any

from hopper import compile_kernel

from penstock.ops.triton import attention, latent_attention, linear, ngram, suffix, verification
from penstock.ops.triton.tuning import (
    MAX_FEW_ROWS,
    Launch,
    decode_group_rows,
    decode_plan,
    few_rows_tile,
    latent_decode_plan,
)

Kernel = tuple[Any, dict[str, Any], Launch]


def attend(
    queries: int, group: int, head_dim: int = 128, element_size: int = 2, num_requests: int = 1
) -> Kernel:
    rows = decode_group_rows(head_dim, element_size, group, queries)
    assert rows is not None
    plan = decode_plan(head_dim, element_size, num_requests, 8, queries, rows)
    constants = {
        "QUERIES": queries, "GROUP": group, "GROUP_ROWS": rows, "HEAD_DIM": head_dim,
        "DIMS": head_dim, "KV_HEADS": 8, "BLOCK_SIZE": 16, "TILE": plan.tile,
        "SPLITS": plan.splits, "MIN_TILES": plan.min_tiles, "WINDOW": False, "CHUNKED": False,
        "SOFTCAP": False, "SINKS": False, "OVERLAP": True,
        "PRECISION": "ieee" if element_size == 4 else "tf32",
    }  # fmt: skip
    return attention._decode_kernel, constants, plan.launch


def attend_latent(queries: int, element_size: int = 2) -> Kernel:
    plan = latent_decode_plan(queries * 128, element_size, 8)
    constants = {
        "QUERIES": queries, "HEADS": 128, "ROWS": plan.rows, "RANK": 512, "DIMS": 512, "ROPE": 64,
        "ROPE_DIMS": 64, "BLOCK_SIZE": 64, "TILE": plan.tile, "SPLITS": plan.splits,
        "MIN_TILES": plan.min_tiles, "PRECISION": "ieee" if element_size == 4 else "tf32",
    }  # fmt: skip
    return latent_attention._decode_kernel, constants, plan.launch


def multiply(out_features: int) -> Kernel:
    tile = few_rows_tile(out_features)
    constants = {
        "BIAS": False, "ROWS": MAX_FEW_ROWS, "COLUMNS": tile.columns, "DEPTH": tile.depth,
        "STAGES": tile.launch.num_stages, "OVERLAP": True,
    }  # fmt: skip
    return linear._few_rows_kernel, constants, tile.launch


KERNELS: dict[str, Kernel] = {
    "one token": attend(1, 4),
    "five tokens": attend(8, 4),
    "five tokens of many": attend(8, 4, num_requests=64),
    "sixteen tokens": attend(16, 8),
    "wide heads": attend(16, 8, head_dim=256),
    "latent": attend_latent(8),
    "float32": attend(16, 8, element_size=4),
    "float32 wide heads": attend(8, 8, head_dim=256, element_size=4),
    "float32 latent": attend_latent(8, element_size=4),
    "few rows": multiply(4096),
    "few rows, more programs": multiply(6144),
    "few rows, many programs": multiply(24576),
    "few rows, uneven": multiply(32000),
    "verify": (verification._verify_kernel, {"COLUMNS": 8}, Launch(1, 1)),
    "write drafts": (verification._write_drafts_kernel, {"COLUMNS": 4}, Launch(1, 1)),
    "match": (ngram._match_kernel, {"SHORTEST": 2, "LONGEST": 5, "CHUNK": 1024}, Launch(4, 1)),
    "draft": (ngram._draft_kernel, {"COLUMNS": 8}, Launch(1, 1)),
    "match suffixes": (
        suffix._match_kernel,
        {"OWN_SPLITS": 8, "PAST_SPLITS": 56, "SHORTEST": 2, "LONGEST": 23, "CHUNK": 1024},
        Launch(4, 1),
    ),
    "vote": (suffix._vote_kernel, {"OWN_SPLITS": 8, "SPLITS": 64, "COLUMNS": 64}, Launch(4, 1)),
    "append": (suffix._append_kernel, {"CONTEXT": 6, "MOST": 8192, "CHUNK": 1024}, Launch(4, 1)),
}
POINTERS = {
    "table_ptr": "*i32", "seq_lens_ptr": "*i32", "query_starts_ptr": "*i32",
    "partial_ptr": "*fp32", "lse_ptr": "*fp32", "arrived_ptr": "*i32", "scale": "fp32",
    "softcap": "fp32", "value_scale": "fp32", "starts_ptr": "*i32", "rows_ptr": "*i32",
    "slots_ptr": "*i64", "step_tokens_ptr": "*i32", "sampled_ptr": "*i64", "faulted_ptr": "*i8",
    "token_table_ptr": "*i32", "num_tokens_ptr": "*i32", "num_computed_ptr": "*i32",
    "results_ptr": "*i32", "out_slots_ptr": "*i64", "last_rows_ptr": "*i64",
    "num_accepted_ptr": "*i32", "drafts_ptr": "*i32", "best_ptr": "*i64",
    "slot_salts_ptr": "*i64", "past_ptr": "*i32", "past_salts_ptr": "*i64", "window_ptr": "*i64",
    "found_ptr": "*i64", "output_starts_ptr": "*i64", "salt": "i64", "num_prompt_ptr": "*i32",
}  # fmt: skip
INPUTS = ("q_ptr", "q_rope_ptr", "cache_ptr", "sinks_ptr", "x_ptr", "weight_ptr", "bias_ptr")
SIXTEENS = (
    "q_stride", "out_stride", "page_stride", "table_stride", "in_features", "out_features"
)  # fmt: skip


def compile_one(kernel: str) -> dict[str, int]:
    function, constants, launch = KERNELS[kernel]
    kind = "*fp32" if kernel.startswith("float32") else "*bf16"
    own = dict.fromkeys((*INPUTS, "out_ptr"), kind)
    code = compile_kernel(function, constants, {**POINTERS, **own}, SIXTEENS, **launch._asdict())
    return {
        "tensor cores": code.ptx.count("mma"),
        "copies of 16 bytes": code.ptx.count("cp.async.cg"),
        "spills": code.ptx.count(".local"),
        "shared memory": code.shared_bytes,
    }


if __name__ == "__main__":
    print(json.dumps({kernel: compile_one(kernel) for kernel in sys.argv[1:] or KERNELS}))
