"""Greedy tokens of an adapter in a slot, against those of the merged model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adapters import MergedReference, reference_tokens
from lora_slots import open_with_slots
from tiny_engine import greedy_tokens

from penstock.protocol.step import NO_SLOT


def check_slot_tokens(
    checkpoint: Path, adapter: Path, backend: str, prompts: Sequence[Any]
) -> None:
    """The adapter gives the merged model's tokens, also beside requests for the base."""
    expected = reference_tokens(MergedReference(checkpoint, adapter), prompts)
    with open_with_slots(checkpoint, cpu_backend=backend) as (llm, slots):
        base = greedy_tokens(llm, prompts)
        slots.place(1, adapter)
        assert greedy_tokens(llm, prompts) == base
        slots.use(1)
        found = greedy_tokens(llm, prompts)
        assert found == expected
        assert found != base
        slots.use(1, NO_SLOT)  # beside the base
        mixed = greedy_tokens(llm, [prompts[0], prompts[0], prompts[1], prompts[1]])
        assert mixed == [expected[0], base[0], expected[1], base[1]]
