"""Kernels compiled for a Hopper GPU where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


class Code(NamedTuple):
    ptx: str
    shared_bytes: int


def compile_kernel(
    function: Any,
    constants: Mapping[str, Any],
    pointers: Mapping[str, str],  # types, by argument; all other arguments are int32
    sixteens: Collection[str],  # arguments that are multiples of 16, as all pointers are
    **options: Any,
) -> Code:
    signature, constexprs, attributes = {}, {}, {}
    for index, name in enumerate(function.arg_names):
        if name in constants:
            signature[name], constexprs[index,] = "constexpr", constants[name]
        else:
            signature[name] = pointers.get(name, "i32")
            if name in pointers or name in sixteens:
                attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constexprs, attributes)
    compiled = triton.compile(source, GPUTarget("cuda", 90, 32), options)
    return Code(compiled.asm["ptx"], compiled.metadata.shared)


def run_script(script: str, *arguments: str) -> dict[str, dict[str, int]]:
    """What a script of this folder prints. In a test's own process Triton interprets."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return found
