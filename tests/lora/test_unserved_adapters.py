"""Adapters of layers that take none while serving: latent attention's kv_b_proj, vision towers."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapters import MakeCheckpoint, MergedReference, make_adapter, reference_tokens
from tiny_engine import greedy_tokens, open_llm, random_prompts

from penstock import LoRARequest
from penstock.protocol.errors import InputError

PROMPTS = random_prompts("latent", 5, 9)


def test_an_adapter_of_kv_b_proj_is_refused_for_serving_and_can_be_merged(
    checkpoint_of: MakeCheckpoint, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of("deepseek_v3")
    adapter = make_adapter(tmp_path, checkpoint, target_modules=["kv_b_proj", "o_proj"])
    with (
        open_llm(checkpoint, enable_lora=True) as llm,
        pytest.raises(InputError, match=r"kv_b_proj.*cannot change.*penstock merge"),
    ):
        llm.generate(PROMPTS, lora_request=LoRARequest("own", 1, str(adapter)), use_tqdm=False)
    with open_llm(checkpoint, merge_lora=str(adapter)) as llm:
        found = greedy_tokens(llm, PROMPTS)
    assert found == reference_tokens(MergedReference(checkpoint, adapter), PROMPTS)
