"""Adapters of the token embedding and the LM head, and matrices that replace them."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapters import FLAVOURS, make_adapter, make_flavour
from slot_tokens import check_slot_tokens
from tiny_engine import random_prompts
from tiny_models import make_checkpoint

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
    check_slot_tokens(
        checkpoint, make_flavour(tmp_path / "adapter", checkpoint, flavour), backend, PROMPTS
    )


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_dora_scales_what_the_model_and_the_adapter_give(
    module: str, backend: str, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "llama")
    settings = {"target_modules": [module, "q_proj"], "use_dora": True}
    check_slot_tokens(
        checkpoint, make_adapter(tmp_path / "adapter", checkpoint, **settings), backend, PROMPTS
    )
