"""Two ranks give the merged model's tokens: every kind of layer has its share of an adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapters import (
    FLAVOURS,
    SINGLE_EXPERTS,
    MergedReference,
    make_flavour,
    make_single_experts,
    reference_tokens,
)
from tiny_engine import open_llm, random_prompts
from tiny_models import make_checkpoint

from penstock import SamplingParams
from penstock.protocol.adapter import LoRARequest

PROMPTS = random_prompts(13, 5, 9)
ODD = {"vocab_size": 257}  # ranks have different numbers of tokens


SHORT = [("embedding_and_head", "saved_modules"), ("stacked_experts",)]
LONG = [
    "all_linear",
    "dora_biased",
    "bias_all",
    "tied_embedding",
    "tied_saved",
    "stacked_transposed",
]
LONG += ["mixtral"]  # single experts


@pytest.mark.parametrize(
    "flavours",
    [*SHORT, *(pytest.param((name,), marks=pytest.mark.slow) for name in LONG)],
    ids=" and ".join,
)
def test_two_ranks_give_the_merged_models_tokens(flavours: tuple[str, ...], tmp_path: Path) -> None:
    """Of each of the flavours, which are adapters of one checkpoint."""
    if flavours[0] in SINGLE_EXPERTS:
        checkpoint = make_checkpoint(tmp_path / "model", flavours[0])
        adapters = [make_single_experts(tmp_path / "adapter", checkpoint, flavours[0])]
    else:
        (variant,) = {FLAVOURS[name].variant for name in flavours}
        checkpoint = make_checkpoint(tmp_path / "model", variant, **ODD)
        adapters = [make_flavour(tmp_path / name, checkpoint, name) for name in flavours]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    options = {"enable_lora": True, "max_lora_rank": 64, "tensor_parallel_size": 2}
    with open_llm(checkpoint, **options) as llm:
        base = llm.generate(PROMPTS, params, use_tqdm=False)
        for number, adapter in enumerate(adapters, start=1):
            expected = reference_tokens(MergedReference(checkpoint, adapter), PROMPTS)
            request = LoRARequest(adapter.name, number, str(adapter))
            outputs = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=request)
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected
            assert [list(output.outputs[0].token_ids) for output in base] != expected
