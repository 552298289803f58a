"""Compiles kernels of `penstock.ops.triton.gguf` for a Hopper GPU, without one.

python compile_gguf.py KERNEL:TYPE...    prints what is in the code of each, as JSON
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from hopper import compile_kernel

from penstock.loading.gguf.file import GGML_TYPES
from penstock.ops.blocks import BlockTensor
from penstock.ops.triton import gguf, gguf_experts, gguf_row
from penstock.ops.triton.gguf_layout import Planes, prepare_gguf
from penstock.ops.triton.tuning_gguf import tensor_plan

EXPERTS = {"TOP_K": 2, "SORTED": True, "TOKENS": 16, "ROWS": 64, "QUADS": 8, "GROUPED": 1,
           "EVEN": True}  # fmt: skip
KERNELS = {
    "row": (
        gguf._one_row_kernel,
        {"WHOLE": True, "OVERLAP": True, "STEPS": 2, "QUADS": 128, "EVEN": True},
    ),
    "long row": (
        gguf._one_row_kernel,
        {"WHOLE": False, "OVERLAP": True, "STEPS": 1, "QUADS": 64, "EVEN": False},
    ),
    "tensor row": (
        gguf_row._tensor_row_kernel,
        {"ASM": True, "MASKED": False, "OVERLAP": True, "STEPS": 2},
    ),
    "floats": (gguf._floats_kernel, {"CHOSEN": True, "QUADS": 128}),
    "experts": (gguf_experts._experts_kernel, EXPERTS),
    "float32 experts": (gguf_experts._experts_kernel, EXPERTS),
}  # fmt: skip
POINTERS = {
    "x_ptr": "*bf16", "bias_ptr": "*bf16", "out_ptr": "*bf16",
    "factor_ptr": "*fp32", "row_ptr": "*i64", "pair_ptr": "*i32",
    "expert_ptr": "*i32", "rows_ptr": "*i32",
}  # fmt: skip
DTYPES = {
    torch.int32: "*i32", torch.float16: "*fp16", torch.uint8: "*u8", torch.int8: "*i8",
    torch.int16: "*i16", torch.int64: "*i64",
}  # fmt: skip


def a_matrix(type_name: str) -> Planes:
    own = next(one for one in GGML_TYPES.values() if one.name == type_name)
    data = torch.zeros(1, 256 // own.block_size * own.block_bytes, dtype=torch.uint8)
    return prepare_gguf(BlockTensor(*own, data), torch.device("cpu"))


def compile_one(kernel: str, type_name: str) -> dict[str, int]:
    function, settings = KERNELS[kernel]
    options: dict[str, Any] = {"num_warps": 2 if kernel == "long row" else 4}
    planes = a_matrix(type_name)
    constants: dict[str, Any] = {"BIAS": True, **planes.constants, **settings}
    names = ("words_ptr", "high_ptr", "first_ptr", "second_ptr", "third_ptr")
    weights = zip(names, planes.pointers, strict=True)
    pointers = {**POINTERS, **{name: DTYPES[tensor.dtype] for name, tensor in weights}}
    if kernel == "tensor row":
        pointers |= {"words_ptr": "*i16", "high_ptr": "*i16"}
        plan = tensor_plan(planes.layout.group, 4096, 4096)
        constants["BLOCKS"] = plan.warps * plan.turns
        options = {"num_warps": plan.warps, "num_stages": 1, "maxnreg": plan.registers}
    if kernel == "float32 experts":
        pointers |= dict.fromkeys(("x_ptr", "bias_ptr", "out_ptr"), "*fp32")
        options["num_stages"] = 2
    sixteens = ("in_features", "x_stride", "out_stride")
    code = compile_kernel(function, constants, pointers, sixteens, **options)
    before, _, after = code.ptx.partition("griddepcontrol.wait")
    return {
        "loads of 16 bytes": _count(code.ptx, "ld.global"),
        "stores of 16 bytes": _count(code.ptx, "st.global"),
        "loads before it waits": before.count("ld.global") if after else 0,
        "tensor cores": code.ptx.count("mma"),
        "shared memory": code.shared_bytes,
    }


def _count(ptx: str, instruction: str) -> int:
    return sum(instruction in line and ".v4.b32" in line for line in ptx.splitlines())


if __name__ == "__main__":
    asked = [argument.split(":") for argument in sys.argv[1:]]
    print(json.dumps({f"{kernel}:{own}": compile_one(kernel, own) for kernel, own in asked}))
