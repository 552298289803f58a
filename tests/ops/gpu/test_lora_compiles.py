"""The LoRA kernels, compiled for a Hopper GPU where there is none."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs Triton")

from hopper import run_script


def check(*kernels: str) -> None:
    for name, counts in run_script("compile_lora.py", *kernels).items():
        if name.startswith(("shrink", "expand")):
            assert counts["wide loads before it waits"] >= 2, name
            assert (counts["tensor cores"] > 0) == ("*fp32" not in name), name
        # Of an H200's processor; smaller GPUs have 99 KB.
        assert counts["shared memory"] <= 99 * 1024, name


def test_weights_are_loaded_before_the_kernels_wait() -> None:
    check("shrink:*bf16:16:16", "expand:*bf16:16:16", "group:*bf16:16:16")


@pytest.mark.slow
def test_all_ranks_and_types_compile_and_fit() -> None:
    check(
        "shrink:*bf16:8:16", "shrink:*fp16:64:64", "shrink:*fp32:64:64", "shrink:*bf16:128:64",
        "expand:*bf16:8:16", "expand:*fp16:64:64", "expand:*fp32:64:64", "expand:*bf16:128:64",
        "gather:*bf16:16:16", "group:*bf16:16:64",
    )  # fmt: skip
