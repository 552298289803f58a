"""Compiles the LoRA kernels for a Hopper GPU, without one.

python compile_lora.py KERNEL:TYPE:RANK:ROWS...    prints what is in the code of each, as JSON
"""

from __future__ import annotations

import json
import sys

from hopper import compile_kernel

from penstock.ops.triton import lora, lora_tiles


def compile_one(kernel: str, dtype: str, rank: int, rows: int) -> dict[str, int]:
    padded = max(rank, lora.MIN_DOT)
    constants = {"RANK": rank, "PADDED": padded, "ROWS": rows, "OVERLAP": True}
    constants["RANKS"] = min(padded, lora.MAX_RANKS)
    pointers = {
        "x_ptr": dtype, "a_ptr": dtype, "b_ptr": dtype, "rank_ptr": "*i32", "row_ptr": "*i32",
        "tile_ptr": "*i32", "part_ptr": "*i32",
        "v_ptr": dtype if rows == 16 else "*fp32", "vector_ptr": "*fp32",
        "out_ptr": "*fp32" if kernel == "shrink" else dtype, "slot_ptr": "*i32",
        "start_ptr": "*i32", "token_ptr": "*i32",
    }  # fmt: skip
    if kernel == "shrink":
        plan = lora.lora_shrink_plan(12, 4096, rows, constants["RANKS"], 4 if "32" in dtype else 2)
        own = {"DEPTH": plan.depth, "LOOP": plan.depth * plan.splits < 4096}
        code = compile_kernel(
            lora._shrink_kernel, {**constants, **own}, pointers,
            ("in_features", "x_stride", "depth_each"), **plan.launch._asdict(),
        )  # fmt: skip
    elif kernel == "expand":
        tile = lora.lora_expand_tile(10**6, rows, constants["RANKS"])
        own = {
            "JOINED": rows == 16,
            "PARTS": 3,
            "SPLITS": 1 if rows == 16 else 8,
            "EVEN": True,
            "COLUMNS": tile.columns,
        }
        code = compile_kernel(
            lora._expand_kernel, {**constants, **own}, pointers,
            ("out_features", "out_stride", "v_stride"), **tile.launch._asdict(),
        )  # fmt: skip
    elif kernel == "gather":
        del constants["OVERLAP"], constants["RANKS"]
        code = compile_kernel(lora._gather_kernel, constants, pointers, (), num_warps=1)
    else:
        own = {"TILE_ROWS": rows, "SLOTS": 8, "CHUNK": 1024}
        code = compile_kernel(lora_tiles._group_kernel, own, pointers, (), num_warps=8)
    before, _, _ = code.ptx.partition("griddepcontrol.wait")
    return {
        "wide loads before it waits": sum(
            "ld.global" in line and ".v4" in line for line in before.splitlines()
        ),
        "tensor cores": code.ptx.count("mma.sync") + code.ptx.count("wgmma.mma"),
        "shared memory": code.shared_bytes,
    }


if __name__ == "__main__":
    asked = [argument.split(":") for argument in sys.argv[1:]]
    print(
        json.dumps(
            {":".join(own): compile_one(own[0], own[1], int(own[2]), int(own[3])) for own in asked}
        )
    )
