"""Adapters of routed experts, one by one and stacked, on every implementation."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapters import (
    FLAVOURS,
    MergedReference,
    make_flavour,
    make_single_experts,
    reference_tokens,
)
from lora_slots import open_with_slots
from tiny_engine import greedy_tokens, random_prompts
from tiny_models import make_checkpoint

from penstock.protocol.step import NO_SLOT

PROMPTS = random_prompts(12, 5, 9)
STACKED = ["stacked_experts", "stacked_down", "stacked_gate_up", "stacked_transposed"]
SINGLE = ["qwen3_moe", "mixtral"]


def check(checkpoint: Path, adapter: Path, backend: str) -> None:
    expected = reference_tokens(MergedReference(checkpoint, adapter), PROMPTS)
    with open_with_slots(checkpoint, cpu_backend=backend) as (llm, slots):
        base = greedy_tokens(llm, PROMPTS)
        slots.place(1, adapter)
        assert greedy_tokens(llm, PROMPTS) == base
        slots.use(1)
        found = greedy_tokens(llm, PROMPTS)
        assert found == expected
        assert found != base
        slots.use(1, NO_SLOT)  # beside the base
        mixed = greedy_tokens(llm, [PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]])
        assert mixed == [expected[0], base[0], expected[1], base[1]]


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("flavour", [*STACKED, "shared_expert"])
def test_stacked_experts_equal_the_merged_model(flavour: str, backend: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", FLAVOURS[flavour].variant)
    check(checkpoint, make_flavour(tmp_path / "adapter", checkpoint, flavour), backend)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("variant", SINGLE)
def test_experts_one_by_one_equal_the_merged_model(
    variant: str, backend: str, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", variant)
    check(checkpoint, make_single_experts(tmp_path / "adapter", checkpoint, variant), backend)
