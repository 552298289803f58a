"""Compiles kernels of weights of 4 bits for a Hopper GPU, without one.

python compile_w4.py KERNEL:TYPE:KIND:PARTS...    prints what is in the code of each, as JSON
"""

from __future__ import annotations

import json
import sys
from typing import Any

from hopper import compile_kernel

from penstock.ops.triton import packed, packed_experts, w4_row
from penstock.ops.triton.tuning import Launch
from penstock.ops.triton.tuning_quantized import quantized_experts_plan, w4_plan


def sizes(kernel: str, element_size: int) -> tuple[dict[str, Any], Launch]:
    """What many rows of x are multiplied by."""
    if kernel == "tile":
        plan = w4_plan(128, 1 << 17, 4096, element_size)
        assert plan is not None
        return {"SPLITS": 1, "ROWS": plan.rows, "TOKENS": plan.tokens}, plan.launch
    rows, tile, _ = quantized_experts_plan(1024, 8, element_size)
    own = {"TOP_K": 2, "ACTIVATION": "silu", "ROWS": rows, "COLUMNS": tile.columns, "GROUP": 1}
    return own, tile.launch


def compile_one(kernel: str, dtype: str, kind: str, parts: int) -> dict[str, int]:
    constants = {
        "BIAS": False, "KIND": "fp4" if kind == "floats" else "w4", "GLOBAL": False,
        "ZEROS": kind == "zeros", "PARTS": parts, "ASM": True,
    }  # fmt: skip
    pointers = {
        "x_ptr": dtype, "weight_ptr": "*i16", "scale_ptr": dtype, "zero_ptr": "*u8",
        "extra_ptr": "*fp32", "bias_ptr": dtype, "out_ptr": dtype, "partial_ptr": "*fp32",
        "arrived_ptr": "*i32", "pair_ptr": "*i32", "expert_ptr": "*i32", "rows_ptr": "*i32",
    }  # fmt: skip
    if kernel == "row":
        own = {"MASKED": "chunks", "OVERLAP": True, "WARPS": 4, "chunks_each": 1}
        code = compile_kernel(
            w4_row._one_row_kernel, {**constants, **own}, pointers,
            ("in_features", "out_features", "num_chunks", "num_groups"),
            num_warps=4, num_stages=1, maxnreg=w4_row.REGISTERS,
        )  # fmt: skip
    else:
        tiles = {"tile": packed._tile_kernel, "experts": packed_experts._gate_up_kernel}
        own, launch = sizes(kernel, 4 if dtype == "*fp32" else 2)
        code = compile_kernel(
            tiles[kernel], {**constants, **own, "EVEN": True}, pointers,
            ("in_features", "out_features", "x_stride", "hidden", "size"), **launch._asdict(),
        )  # fmt: skip
    before, _, after = code.ptx.rpartition("griddepcontrol.wait")
    return {
        "loads before it waits": sum("ld.global" in line and ".v4" in line
                                     for line in before.splitlines()),
        "tensor cores": after.count("mma.sync") + after.count("wgmma.mma"),
        "shared memory": code.shared_bytes,
    }  # fmt: skip


if __name__ == "__main__":
    asked = [argument.split(":") for argument in sys.argv[1:]]
    print(json.dumps({":".join(own): compile_one(*own[:3], int(own[3])) for own in asked}))
