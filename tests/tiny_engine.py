"""Engines for tiny checkpoints, and what they generate greedily from random prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock import LLM, SamplingParams

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "cpu_threads": 1,
    "log_level": "error",
    "kv_cache_memory_bytes": 16 << 20,  # the usual 4 GiB would be a million tiny blocks
}


def open_llm(checkpoint: Path | str, **options: Any) -> LLM:
    return LLM(str(checkpoint), **OPTIONS | options)


def random_prompts(seed: int | str, *lengths: int) -> list[dict[str, list[int]]]:
    """Prompts of token ids, of these lengths."""
    draw = random.Random(seed)
    return [{"prompt_token_ids": [draw.randrange(256) for _ in range(n)]} for n in lengths]


def greedy_tokens(llm: LLM, prompts: Sequence[Any], num_tokens: int = 16) -> list[list[int]]:
    """So many most likely tokens after each of the prompts, which run together."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]
