"""The kernels of weights of 4 bits, compiled for a Hopper GPU where there is none."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs Triton")

from hopper import run_script


def check_rows(*kernels: str) -> None:
    found = run_script("compile_w4.py", *(f"row:{kernel}" for kernel in kernels))
    for name, counts in found.items():
        # Eight chunks of sixteen rows are a warp's: 16 loads of 16 bytes a thread, 64 products.
        assert counts["loads before it waits"] >= 16, name
        assert counts["tensor cores"] >= 64, name
        # An operand that had to change hands would take 32 KiB and more; sums and scales do.
        assert counts["shared memory"] <= 4096, name


def test_words_go_from_memory_to_the_tensor_cores_without_a_detour() -> None:
    check_rows("*bf16:plain:1")


@pytest.mark.slow
def test_one_row_compiles_for_all_kinds_of_weights() -> None:
    check_rows(
        "*fp16:plain:1", "*bf16:zeros:4", "*bf16:floats:4", "*fp16:floats:8", "*bf16:zeros:2"
    )


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["tile", "experts"])
def test_tiles_compile_and_fit(kernel: str) -> None:
    kinds = ("*bf16:plain:1", "*fp16:zeros:4", "*bf16:floats:8", "*fp32:zeros:8", "*fp32:floats:8")
    for name, counts in run_script(
        "compile_w4.py", *(f"{kernel}:{kind}" for kind in kinds)
    ).items():
        is_float32 = "*fp32" in name
        assert (counts["tensor cores"] > 0) == (not is_float32), name
        # Of an H200's processor; smaller GPUs have 99 KB.
        assert counts["shared memory"] <= (96 if is_float32 else 227) * 1024, name
