"""Compiles the kernels of `byte_weights.py` and `byte_experts.py` for a Hopper GPU, without one.

python compile_bytes.py KERNEL...    prints what is in the code of each, as JSON; none: of all
"""

from __future__ import annotations

import json
import sys

from hopper import compile_kernel

from penstock.ops.triton import byte_experts, byte_weights
from penstock.ops.triton.tuning_quantized import byte_plan, quantized_experts_plan

COMMON = {"BIAS": True, "WHOLE": True, "EVEN": True, "BYTES": byte_weights.BYTES}
TABLE = {**COMMON, "TABLE": True, "ZEROS": False}
SMALL_GROUPS = {**TABLE, "WHOLE": False}
INTEGERS = {**COMMON, "TABLE": False, "ZEROS": True}


def tile(element_size: int) -> dict[str, int]:
    plan = byte_plan(16 if element_size == 2 else 128, 4096, 4096, element_size)
    assert plan is not None
    return {"SPLITS": 2, "ROWS": plan.rows, "TOKENS": plan.tokens}


def experts(element_size: int, part: str) -> dict[str, int | str]:
    plan = quantized_experts_plan(16 if element_size == 2 else 1024, 8, element_size)
    columns = getattr(plan, part).columns
    return {"TOP_K": 2, "ACTIVATION": "silu", "ROWS": plan.rows, "COLUMNS": columns, "GROUP": 1}


KERNELS = {
    "tile, table": (byte_weights._tile_kernel, {**TABLE, **tile(2)}),
    "tile, integers": (byte_weights._tile_kernel, {**INTEGERS, **tile(2)}),
    "tile, small groups": (byte_weights._tile_kernel, {**SMALL_GROUPS, **tile(2)}),
    "floats": (byte_weights._dequantize_kernel, {**TABLE, "WIDTH": 1024}),
    "gate and up": (byte_experts._gate_up_kernel, {**TABLE, **experts(2, "gate_up")}),
    "down": (byte_experts._down_kernel, {**INTEGERS, **experts(2, "down")}),
    "float32 tile": (byte_weights._tile_kernel, {**SMALL_GROUPS, **tile(4)}),
    "float32 gate and up": (
        byte_experts._gate_up_kernel, {**SMALL_GROUPS, **experts(4, "gate_up")}
    ),
    "float32 down": (byte_experts._down_kernel, {**SMALL_GROUPS, **experts(4, "down")}),
}  # fmt: skip
POINTERS = {
    "partial_ptr": "*fp32", "weight_ptr": "*u8", "zero_ptr": "*u8", "value_ptr": "*fp32",
    "scale_ptr": "*fp32", "factor_ptr": "*fp32", "arrived_ptr": "*i32", "pair_ptr": "*i32",
    "expert_ptr": "*i32", "rows_ptr": "*i32",
}  # fmt: skip
SIXTEENS = ("in_features", "hidden", "size", "num_bytes", "x_stride")


def compile_one(kernel: str) -> dict[str, int]:
    function, constants = KERNELS[kernel]
    is_float32 = kernel.startswith("float32")
    kind = "*fp32" if is_float32 else "*bf16"
    pointers = {**POINTERS, "x_ptr": kind, "bias_ptr": kind, "out_ptr": kind}
    stages = 2 if is_float32 else 3
    code = compile_kernel(function, constants, pointers, SIXTEENS, num_warps=4, num_stages=stages)
    return {
        "tensor cores": code.ptx.count("mma"),
        "copies of 16 bytes": code.ptx.count("cp.async.cg"),
        "shared memory": code.shared_bytes,
    }


if __name__ == "__main__":
    print(json.dumps({kernel: compile_one(kernel) for kernel in sys.argv[1:] or KERNELS}))
