"""Greedy tokens equal transformers' in float32, on a tiny checkpoint of every architecture."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tiny_models import VARIANTS, Reference, count_near_ties, make_checkpoint

from penstock import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
MARGIN = 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_equal_transformers_alone_and_batched(variant: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, variant)
    rng = random.Random(variant)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (1, 5, 30, 77, 130)]
    reference = Reference(folder)
    expected = [reference.greedy(prompt, GREEDY.max_tokens or 0) for prompt in prompts]
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    with LLM(
        str(folder), skip_tokenizer_init=True, cpu_threads=1, max_num_seqs=8, max_model_len=512
    ) as llm:
        batched = llm.generate(requests, GREEDY, use_tqdm=False)
        alone = [llm.generate(request, GREEDY, use_tqdm=False)[0] for request in requests]
    num_ties = 0
    for outputs in (batched, alone):
        for output, (tokens, margins) in zip(outputs, expected, strict=True):
            num_ties += count_near_ties(output.outputs[0].token_ids, tokens, margins, MARGIN)
    assert num_ties <= 1
