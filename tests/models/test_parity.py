"""Greedy tokens equal transformers' in float32, on a tiny checkpoint of every architecture."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_engine import greedy_tokens, open_llm, random_prompts
from tiny_models import Reference, make_checkpoint
from tiny_variants import VARIANTS

NUM_TOKENS = 40


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_equal_transformers_alone_and_batched(variant: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, variant)
    prompts = random_prompts(variant, 1, 5, 30, 77, 130)
    with open_llm(folder, max_num_seqs=8, max_model_len=512) as llm:
        batched = greedy_tokens(llm, prompts, NUM_TOKENS)
        alone = [greedy_tokens(llm, [prompt], NUM_TOKENS)[0] for prompt in prompts]
    reference = Reference(folder)
    num_ties = 0
    for ours in (batched, alone):
        for prompt, own in zip(prompts, ours, strict=True):
            num_ties += reference.count_near_ties(prompt["prompt_token_ids"], own)
    assert num_ties <= 1
