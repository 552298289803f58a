"""Adapters of routed experts, one by one and stacked, on every implementation."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapters import (
    ATTENTION,
    FLAVOURS,
    make_adapter,
    make_flavour,
    make_single_experts,
)
from slot_tokens import check_slot_tokens
from tiny_engine import random_prompts
from tiny_models import make_checkpoint

PROMPTS = random_prompts(12, 5, 9)
STACKED = ["stacked_experts", "stacked_down", "stacked_gate_up", "stacked_transposed"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SINGLE = ["qwen3_moe", "mixtral"]


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("flavour", [*STACKED, "shared_expert"])
def test_stacked_experts_equal_the_merged_model(flavour: str, backend: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", FLAVOURS[flavour].variant)
    check_slot_tokens(
        checkpoint, make_flavour(tmp_path / "adapter", checkpoint, flavour), backend, PROMPTS
    )


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("variant", SINGLE)
def test_experts_one_by_one_equal_the_merged_model(
    variant: str, backend: str, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", variant)
    check_slot_tokens(
        checkpoint, make_single_experts(tmp_path / "adapter", checkpoint, variant), backend, PROMPTS
    )


@pytest.mark.parametrize("is_stacked", [True, False])
def test_experts_of_minimax_equal_the_merged_model(is_stacked: bool, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "minimax_m2")
    if is_stacked:
        settings = {"target_modules": ATTENTION, "target_parameters": EXPERTS}
        adapter = make_adapter(tmp_path / "adapter", checkpoint, **settings)
    else:
        adapter = make_single_experts(tmp_path / "adapter", checkpoint, "minimax_m2")
    check_slot_tokens(checkpoint, adapter, "auto", PROMPTS)
