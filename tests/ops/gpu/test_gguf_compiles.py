"""The kernels of GGUF blocks, compiled for a Hopper GPU where there is none."""

from __future__ import annotations

import pytest
from gguf_builder import GRID_TYPES

pytest.importorskip("triton", reason="needs Triton")

from hopper import run_script


def check(*kernels: str) -> None:
    for name, counts in run_script("compile_gguf.py", *kernels).items():
        if name.startswith("experts"):
            assert counts["tensor cores"] > 0, name
        elif name.startswith("float32 experts"):
            assert counts["shared memory"] <= 96 * 1024, name  # smaller GPUs have 99
        else:  # what threads need is theirs from the first: only sums are exchanged
            if name.rpartition(":")[2] not in GRID_TYPES:
                assert counts["loads of 16 bytes"] > 0, name
            if name.startswith("floats"):  # brought into the order of columns, to be stored
                assert counts["stores of 16 bytes"] > 0, name
            else:
                assert counts["shared memory"] <= 1024, name
        if "row" in name:
            assert counts["loads before it waits"] > 0, name
        if name.startswith("tensor row"):
            assert counts["tensor cores"] > 0, name


def test_kernels_compile_and_load_sixteen_bytes_at_once() -> None:
    check("row:Q4_K", "tensor row:Q6_K", "experts:Q6_K", "row:IQ2_XXS", "floats:Q4_K")


@pytest.mark.slow
def test_kernels_on_the_tensor_cores_compile() -> None:
    types = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
    check(*(f"tensor row:{own}" for own in types))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["row", "long row", "floats", "experts", "float32 experts"])
def test_kernels_of_every_kind_of_blocks_compile(kernel: str) -> None:
    types = ("Q8_0", "Q4_1", "Q5_0", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4", "TQ2_0")
    check(*(f"{kernel}:{own}" for own in (*types, *GRID_TYPES)))
