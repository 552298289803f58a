"""Compiles the kernels of `byte_weights.py` and `byte_experts.py` for a Hopper GPU, without one.

python compile_bytes.py KERNEL...    prints what is in the code of each, as JSON; none: of all
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from penstock.ops.triton import byte_experts, byte_weights

COMMON = {"BIAS": True, "WHOLE": True, "EVEN": True, "BYTES": byte_weights.BYTES}
TABLE = {**COMMON, "TABLE": True, "ZEROS": False}
INTEGERS = {**COMMON, "TABLE": False, "ZEROS": True}
TILE = {"SPLITS": 2, "ROWS": 64, "TOKENS": 16}
EXPERTS = {"TOP_K": 2, "ACTIVATION": "silu", "ROWS": 16, "COLUMNS": 64, "GROUP": 1}
KERNELS = {
    "tile, table": (byte_weights._tile_kernel, {**TABLE, **TILE}),
    "tile, integers": (byte_weights._tile_kernel, {**INTEGERS, **TILE}),
    "tile, small groups": (byte_weights._tile_kernel, {**TABLE, **TILE, "WHOLE": False}),
    "floats": (byte_weights._dequantize_kernel, {**TABLE, "WIDTH": 1024}),
    "gate and up": (byte_experts._gate_up_kernel, {**TABLE, **EXPERTS}),
    "down": (byte_experts._down_kernel, {**INTEGERS, **EXPERTS}),
}
POINTERS = {
    "x_ptr": "*bf16", "bias_ptr": "*bf16", "out_ptr": "*bf16", "partial_ptr": "*fp32",
    "weight_ptr": "*u8", "zero_ptr": "*u8", "value_ptr": "*fp32", "scale_ptr": "*fp32",
    "factor_ptr": "*fp32", "arrived_ptr": "*i32", "pair_ptr": "*i32", "expert_ptr": "*i32",
    "rows_ptr": "*i32",
}  # fmt: skip
WHOLE_LINES = ("in_features", "hidden", "size", "num_bytes", "x_stride")


def compile_one(kernel: str) -> dict[str, int]:
    function, constants = KERNELS[kernel]
    signature: dict[str, str] = {}
    constexprs: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for index, name in enumerate(function.arg_names):
        if name in constants:
            signature[name], constexprs[index,] = "constexpr", constants[name]
            continue
        signature[name] = POINTERS.get(name, "i32")
        if name in POINTERS or name in WHOLE_LINES:
            attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constexprs, attributes)
    compiled = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 4})
    code = compiled.asm["ptx"]
    return {
        "tensor cores": code.count("mma"),
        "copies of 16 bytes": code.count("cp.async.cg"),
        "shared memory": compiled.metadata.shared,
    }


if __name__ == "__main__":
    print(json.dumps({kernel: compile_one(kernel) for kernel in sys.argv[1:] or KERNELS}))
