"""The kernel of one row and 4 bits, compiled for a Hopper GPU where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton")

HERE = Path(__file__).parent


def check(*kernels: str) -> None:
    """In a process of its own: in this one Triton interprets."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(HERE / "compile_w4.py"), *kernels]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    for name, counts in found.items():
        # Eight chunks of sixteen rows are a warp's: 16 loads of 16 bytes a thread, 64 products.
        assert counts["loads before it waits"] >= 16, name
        assert counts["tensor cores"] >= 64, name
        # An operand that had to change hands would take 32 KiB and more; sums and scales do.
        assert counts["shared memory"] <= 4096, name


def test_words_go_from_memory_to_the_tensor_cores_without_a_detour() -> None:
    check("*bf16:plain:1")


@pytest.mark.slow
def test_one_row_compiles_for_all_kinds_of_weights() -> None:
    check("*fp16:plain:1", "*bf16:zeros:4", "*bf16:floats:4", "*fp16:floats:8", "*bf16:zeros:2")
