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


@pytest.mark.parametrize(
    "flavour",
    [
        "dora_biased",
        "embedding_and_head",
        "saved_modules",
        "stacked_experts",
        pytest.param("all_linear", marks=pytest.mark.slow),
        pytest.param("bias_all", marks=pytest.mark.slow),
        pytest.param("tied_embedding", marks=pytest.mark.slow),
        pytest.param("tied_saved", marks=pytest.mark.slow),
        pytest.param("stacked_transposed", marks=pytest.mark.slow),
        pytest.param("mixtral", marks=pytest.mark.slow),  # single experts
    ],
)
def test_two_ranks_give_the_merged_models_tokens(flavour: str, tmp_path: Path) -> None:
    if flavour in SINGLE_EXPERTS:
        checkpoint = make_checkpoint(tmp_path / "model", flavour)
        adapter = make_single_experts(tmp_path / "adapter", checkpoint, flavour)
    else:
        checkpoint = make_checkpoint(tmp_path / "model", FLAVOURS[flavour].variant, **ODD)
        adapter = make_flavour(tmp_path / "adapter", checkpoint, flavour)
    expected = reference_tokens(MergedReference(checkpoint, adapter), PROMPTS)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    request = LoRARequest("customer", 1, str(adapter))
    options = {"enable_lora": True, "max_lora_rank": 64, "tensor_parallel_size": 2}
    with open_llm(checkpoint, **options) as llm:
        base = llm.generate(PROMPTS, params, use_tqdm=False)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=request)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert [list(output.outputs[0].token_ids) for output in base] != expected
