"""Weights in GGUF blocks and quantized ones, over ranks and stages, give one rank's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf_twin_files import write_twin
from gguf_twins import TWINS
from stages import local_stages
from tiny_engine import greedy_tokens, open_llm, random_prompts
from tiny_models import make_checkpoint

__all__ = ["local_stages"]

PROMPTS = random_prompts(3, 2, 9, 33)
# Shares of whole blocks and quantization groups.
SIZES = {"hidden_size": 128, "intermediate_size": 128}
EXPERTS = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "num_experts": 4}
TP, PP, EP = ({f"{kind}_parallel_size": 2} for kind in ("tensor", "pipeline", "data"))
EP["enable_expert_parallel"] = True
SLOW = pytest.mark.slow


def check(folder: Path, kind: str, has_experts: bool, ranks: dict[str, Any]) -> None:
    variant, sizes = ("qwen2_moe", SIZES | EXPERTS) if has_experts else ("olmo2", SIZES)
    model, options = make_checkpoint(folder, variant, **sizes), {}
    if kind in ("Q8_0", "Q4_0"):
        twin = TWINS["qwen2moe" if has_experts else "olmo2"]
        model = write_twin(folder / "twin.gguf", model, twin, quantize=kind)
    else:
        options["quantization"] = kind
    with open_llm(model, **options) as llm:
        expected = greedy_tokens(llm, PROMPTS)
    with open_llm(model, **options, **ranks) as llm:
        assert greedy_tokens(llm, PROMPTS) == expected


@pytest.mark.usefixtures("local_stages")
@pytest.mark.parametrize(
    ("kind", "has_experts"),
    [
        ("Q8_0", True),
        pytest.param("Q4_0", False, marks=SLOW),
        pytest.param("fp8", False, marks=SLOW),
        pytest.param("int8", True, marks=SLOW),
    ],
)
def test_stages_give_one_ranks_tokens(kind: str, has_experts: bool, tmp_path: Path) -> None:
    check(tmp_path, kind, has_experts, PP)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "has_experts", "ranks"),
    [
        ("Q8_0", False, TP),
        ("Q4_0", False, TP),
        ("Q8_0", True, TP),
        ("Q8_0", True, TP | {"enable_expert_parallel": True}),
        ("Q8_0", True, EP),
        ("int8", True, EP),
    ],
)
def test_ranks_give_one_ranks_tokens(
    kind: str, has_experts: bool, ranks: dict[str, Any], tmp_path: Path
) -> None:
    """Not with sharded rows of int8 or fp8: a rank rounds its activations by its own scales."""
    check(tmp_path, kind, has_experts, ranks)
