"""The kernels of weights by the byte, compiled for a Hopper GPU where there is none."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs Triton")

from hopper import run_script

SHARED_BYTES = 228 * 1024  # of a processor


def compiled(*kernels: str) -> dict[str, dict[str, int]]:
    found = run_script("compile_bytes.py", *kernels)
    for kernel, code in found.items():
        if kernel.startswith("float32"):
            assert code["shared memory"] <= 96 * 1024, kernel  # smaller GPUs have 99
        else:
            assert code["shared memory"] < SHARED_BYTES, kernel
            assert (code["tensor cores"] > 0) == (kernel != "floats"), kernel
    return found


def test_weights_from_a_table_are_copied_by_sixteen_bytes_and_multiplied_on_tensor_cores() -> None:
    assert compiled("tile, table")["tile, table"]["copies of 16 bytes"] > 0


@pytest.mark.slow
def test_all_kernels_compile_and_fit() -> None:
    compiled()
