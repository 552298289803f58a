"""Compiles the kernel of one row and 4 bits for a Hopper GPU, without one.

python compile_w4.py TYPE:KIND:PARTS...    prints what is in the code of each, as JSON
"""

from __future__ import annotations

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from penstock.ops.triton.w4_row import REGISTERS, _one_row_kernel


def compile_one(dtype: str, kind: str, parts: int) -> dict[str, int]:
    constants = {
        "BIAS": False, "FP4": kind == "floats", "GLOBAL": False, "ZEROS": kind == "zeros",
        "PARTS": parts, "ASM": True, "MASKED": "chunks", "OVERLAP": True, "WARPS": 4,
        "chunks_each": 1,
    }  # fmt: skip
    pointers = {
        "x_ptr": dtype, "weight_ptr": "*i16", "scale_ptr": dtype, "zero_ptr": "*u8",
        "global_ptr": "*fp32", "bias_ptr": dtype, "out_ptr": dtype,
    }  # fmt: skip
    signature, constexprs, attributes = {}, {}, {}
    for index, name in enumerate(_one_row_kernel.arg_names):
        if name in constants:
            signature[name], constexprs[index,] = "constexpr", constants[name]
        else:
            signature[name] = pointers.get(name, "i32")
            attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(_one_row_kernel, signature, constexprs, attributes)
    options = {"num_warps": 4, "num_stages": 1, "maxnreg": REGISTERS}
    compiled = triton.compile(source, GPUTarget("cuda", 90, 32), options)
    before, _, after = compiled.asm["ptx"].partition("griddepcontrol.wait")
    return {
        "loads before it waits": sum("ld.global" in line and ".v4" in line
                                     for line in before.splitlines()),
        "tensor cores": after.count("mma.sync"),
        "shared memory": compiled.metadata.shared,
    }  # fmt: skip


if __name__ == "__main__":
    asked = [argument.split(":") for argument in sys.argv[1:]]
    print(json.dumps({":".join(own): compile_one(own[0], own[1], int(own[2])) for own in asked}))
