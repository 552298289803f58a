"""The kernels of decodes with drafts, compiled for a Hopper GPU where there is none."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs Triton")

from hopper import run_script

SHARED_BYTES = 227 * 1024  # of a program, at most


def check(*kernels: str) -> None:
    found = run_script("compile_verification.py", *kernels)
    cores = ("tokens", "heads", "latent", "rows", "programs", "uneven")
    for kernel, code in found.items():
        assert code["shared memory"] <= SHARED_BYTES, kernel
        assert code["spills"] == 0, kernel
        uses_cores = kernel.endswith(cores) and not kernel.startswith("float32")
        assert not uses_cores or code["tensor cores"] > 0, kernel


def test_a_few_rows_are_multiplied_on_tensor_cores() -> None:
    check("few rows")


def test_drafts_are_attended_on_tensor_cores_and_verified_by_a_kernel() -> None:
    check("five tokens", "verify")


@pytest.mark.slow
def test_all_kernels_compile_and_fit() -> None:
    check()
