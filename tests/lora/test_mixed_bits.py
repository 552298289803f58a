"""Adapters of embeddings, heads and experts beside base rows: rows have their bits of alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adapters import STACKED, MakeCheckpoint, make_adapter
from lora_plans import Driver
from tiny_engine import random_prompts

from penstock.ops.cpu import library

OPTIONS: dict[str, Any] = {"cpu_threads": 2}
ADAPTERS: list[dict[str, Any]] = [
    {"target_modules": ["embed_tokens", "lm_head", "o_proj"]},
    {"target_modules": ["q_proj"], "target_parameters": STACKED},
    {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    {"target_modules": ["embed_tokens"], "target_parameters": STACKED[1:], "use_dora": False},
]
PROMPTS = random_prompts("mixed", 5, 33)


@pytest.mark.skipif(library.load() is None, reason="needs the C++ library")
@pytest.mark.parametrize("variant", ["qwen3_moe", "mixtral", "minimax_m2"])
def test_rows_of_a_mixed_batch_have_the_bits_that_they_have_alone(
    variant: str, checkpoint_of: MakeCheckpoint, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(variant)
    driver = Driver(checkpoint, **OPTIONS)
    for slot, settings in enumerate(ADAPTERS):
        driver.load(make_adapter(tmp_path / str(slot), checkpoint, seed=slot, **settings), slot)
    cases = [(prompt, slot) for prompt in PROMPTS for slot in (-1, *range(len(ADAPTERS)))]
    alone = [driver.generate([driver.request(*case)], 6)[0].bits for case in cases]
    requests = [driver.request(*case) for case in cases]
    assert [one.bits for one in driver.generate(requests, 6, chunk=9)] == alone
    assert len({tuple(rows[0]) for _, rows in alone}) == len(cases)
    driver.close()
