"""The kernels of weights by the byte, compiled for a Hopper GPU where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton")

SHARED_BYTES = 228 * 1024  # of a processor


def compiled(*kernels: str) -> dict[str, dict[str, int]]:
    """In a process of its own: this one may have been told to interpret kernels."""
    script = Path(__file__).with_name("compile_bytes.py")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), *kernels]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    found: dict[str, dict[str, int]] = json.loads(run.stdout)
    for kernel, code in found.items():
        assert code["shared memory"] < SHARED_BYTES, kernel
        assert (code["tensor cores"] > 0) == (kernel != "floats"), kernel
    return found


def test_weights_from_a_table_are_copied_by_sixteen_bytes_and_multiplied_on_tensor_cores() -> None:
    assert compiled("tile, table")["tile, table"]["copies of 16 bytes"] > 0


@pytest.mark.slow
def test_all_kernels_compile_and_fit() -> None:
    compiled()
