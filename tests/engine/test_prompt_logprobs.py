"""Log-probabilities of prompt and output equal transformers', however the prompt is computed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import open_llm
from tiny_models import Reference

from penstock import SamplingParams

PROMPT = [random.Random(1).randrange(256) for _ in range(50)]
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "chunks of 1": {"max_num_batched_tokens": 1},
    "in flight": {"max_num_batched_tokens": 16, "async_scheduling": True},
}


@pytest.fixture(scope="module")
def reference(tiny_qwen3: Path) -> Reference:
    return Reference(tiny_qwen3)


def check(output: Any, reference: Reference, num_top: int) -> None:
    tokens = output.prompt_token_ids + output.outputs[0].token_ids
    expected = torch.log_softmax(reference.logits(tokens), dim=-1)
    entries = output.prompt_logprobs + output.outputs[0].logprobs
    assert entries[0] is None
    assert len(entries) == len(tokens)
    for position in range(1, len(tokens)):
        row = expected[position - 1]
        entry = entries[position]
        assert entry[tokens[position]].logprob == pytest.approx(
            float(row[tokens[position]]), abs=1e-4
        )
        assert entry[tokens[position]].rank == int((row > row[tokens[position]]).sum()) + 1
        top = row.topk(num_top).indices.tolist()
        assert set(top) <= set(entry)
        assert len(entry) <= num_top + 1


@pytest.mark.parametrize("way", WAYS)
def test_logprobs_equal_transformers(way: str, tiny_qwen3: Path, reference: Reference) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=3)
    request = {"prompt_token_ids": PROMPT}
    with open_llm(tiny_qwen3, **WAYS[way]) as llm:
        check(llm.generate(request, params, use_tqdm=False)[0], reference, 3)
        plain = SamplingParams(temperature=0, max_tokens=6)
        llm.generate(request, plain, use_tqdm=False)  # now the prefix cache holds the prompt
        check(llm.generate(request, params, use_tqdm=False)[0], reference, 3)


def test_logprobs_survive_preemption(tiny_qwen3: Path, reference: Reference) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=40, logprobs=2, prompt_logprobs=2, ignore_eos=True
    )
    requests = [{"prompt_token_ids": PROMPT[index:]} for index in range(6)]
    with open_llm(
        tiny_qwen3,
        max_model_len=96,
        num_gpu_blocks_override=16,
        max_num_batched_tokens=24,
    ) as llm:
        outputs = llm.generate(requests, params, use_tqdm=False)
        assert llm.engine.stats().num_preemptions > 0
    for output in outputs:
        check(output, reference, 2)


def test_minus_one_gives_the_whole_vocabulary(tiny_qwen3: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=-1, prompt_logprobs=-1)
    with open_llm(tiny_qwen3, max_logprobs=-1) as llm:
        (output,) = llm.generate({"prompt_token_ids": PROMPT[:3]}, params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    assert output.outputs[0].logprobs is not None
    assert [len(entry) for entry in output.prompt_logprobs[1:] if entry] == [256, 256]
    assert [len(entry) for entry in output.outputs[0].logprobs] == [256, 256]
