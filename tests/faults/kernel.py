"""Compiles a kernel for a GPU that need not be there, once for every line of standard input.

    python tests/faults/kernel.py [FULL_FOLDER]

Prints the digest of the machine code each time. Writing below FULL_FOLDER fails as on a full disk.
"""

from __future__ import annotations

import builtins
import errno
import hashlib
import logging
import os
import sys
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from penstock.ops.triton.cache import use_checked_cache


@triton.jit
def double(x_ptr, num_elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < num_elements
    tl.store(x_ptr + offsets, 2 * tl.load(x_ptr + offsets, mask), mask)


def fill_disk(folder: str) -> None:
    opened = builtins.open

    def open_unless_full(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if "w" in mode and str(path).startswith(folder):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return opened(path, mode, *arguments, **options)

    builtins.open = open_unless_full


def main() -> None:
    logging.basicConfig()
    if len(sys.argv) > 1:
        fill_disk(sys.argv[1])
    use_checked_cache()
    signature = {"x_ptr": "*fp32", "num_elements": "i32", "BLOCK": "constexpr"}
    source = ASTSource(double, signature, constexprs={(2,): 128})
    for _ in sys.stdin:
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        print(hashlib.sha256(compiled.asm["cubin"]).hexdigest(), flush=True)


if __name__ == "__main__":
    main()
