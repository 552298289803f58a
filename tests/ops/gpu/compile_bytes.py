"""Compiles the kernels of weights by the byte for a Hopper GPU, without one.

python compile_bytes.py KERNEL...    prints what is in the code of each, as JSON; none: of all
"""

from __future__ import annotations

import json
import sys
from typing import Any

from hopper import compile_kernel

from penstock.ops.triton import byte_unpack, packed, packed_experts
from penstock.ops.triton.tuning import Launch
from penstock.ops.triton.tuning_quantized import byte_plan, quantized_experts_plan

COMMON = {"BIAS": True, "GLOBAL": False, "PARTS": 1, "EVEN": True, "ASM": True}
TABLE = {**COMMON, "KIND": "table", "ZEROS": False}
SMALL_GROUPS = {**TABLE, "PARTS": 2}
INTEGERS = {**COMMON, "KIND": "w8", "ZEROS": True}


Kernel = tuple[Any, dict[str, Any], Launch]


def tile(numbers: dict[str, Any], element_size: int = 2) -> Kernel:
    plan = byte_plan(16 if element_size == 2 else 128, 4096, 4096, element_size)
    assert plan is not None
    sizes = {"SPLITS": 2, "ROWS": plan.rows, "TOKENS": plan.tokens}
    return packed._tile_kernel, {**numbers, **sizes}, plan.launch


def experts(part: str, numbers: dict[str, Any], element_size: int = 2) -> Kernel:
    plan = quantized_experts_plan(16 if element_size == 2 else 1024, 8, element_size)
    own = plan.gate_up if part == "gate and up" else plan.down
    sizes = {"ROWS": plan.rows, "COLUMNS": own.columns, "GROUP": own.group}
    if part == "down":
        return packed_experts._down_kernel, {**numbers, **sizes}, own.launch
    more = {"TOP_K": 2, "ACTIVATION": "silu"}
    return packed_experts._gate_up_kernel, {**numbers, **sizes, **more}, own.launch


KERNELS = {
    "tile, table": tile(TABLE),
    "tile, integers": tile(INTEGERS),
    "tile, small groups": tile(SMALL_GROUPS),
    "floats": (byte_unpack.dequantize_bytes_kernel, {**TABLE, "WIDTH": 1024}, Launch(4, 3)),
    "gate and up": experts("gate and up", TABLE),
    "down": experts("down", INTEGERS),
    "float32 tile": tile(SMALL_GROUPS, 4),
    "float32 gate and up": experts("gate and up", SMALL_GROUPS, 4),
    "float32 down": experts("down", SMALL_GROUPS, 4),
}
POINTERS = {
    "partial_ptr": "*fp32", "weight_ptr": "*u8", "zero_ptr": "*u8", "value_ptr": "*fp32",
    "extra_ptr": "*fp32", "scale_ptr": "*fp32", "factor_ptr": "*fp32", "arrived_ptr": "*i32",
    "pair_ptr": "*i32", "expert_ptr": "*i32", "rows_ptr": "*i32",
}  # fmt: skip
SIXTEENS = ("in_features", "hidden", "size", "num_bytes", "width", "x_stride")


def compile_one(kernel: str) -> dict[str, int]:
    function, constants, launch = KERNELS[kernel]
    kind = "*fp32" if kernel.startswith("float32") else "*bf16"
    pointers = {**POINTERS, "x_ptr": kind, "bias_ptr": kind, "out_ptr": kind}
    code = compile_kernel(function, constants, pointers, SIXTEENS, **launch._asdict())
    return {
        "tensor cores": code.ptx.count("mma"),
        "copies of 16 bytes": code.ptx.count("cp.async.cg"),
        "shared memory": code.shared_bytes,
    }


if __name__ == "__main__":
    print(json.dumps({kernel: compile_one(kernel) for kernel in sys.argv[1:] or KERNELS}))
