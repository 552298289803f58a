"""Adapters of the token embedding and the LM head, and matrices that replace them."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapters import FLAVOURS, MergedReference, make_adapter, make_flavour, reference_tokens
from lora_slots import open_with_slots
from tiny_engine import greedy_tokens, random_prompts
from tiny_models import make_checkpoint

from penstock.protocol.step import NO_SLOT

PROMPTS = random_prompts(11, 5, 9)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize(
    "flavour",
    [
        "embedding_alone", "head_alone", "embedding_and_head", "saved_modules", "tied_embedding",
        "tied_saved", "trained_tokens",
    ],
)  # fmt: skip
def test_tokens_equal_those_of_the_merged_model(flavour: str, backend: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", FLAVOURS[flavour].variant)
    check(checkpoint, make_flavour(tmp_path / "adapter", checkpoint, flavour), backend)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_dora_scales_what_the_model_and_the_adapter_give(
    module: str, backend: str, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "llama")
    settings = {"target_modules": [module, "q_proj"], "use_dora": True}
    check(checkpoint, make_adapter(tmp_path / "adapter", checkpoint, **settings), backend)


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
