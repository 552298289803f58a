"""Draft models and EAGLE-3 heads on a GPU, in float32: the tokens are those without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import Plain, Watched, make_head
from gpu_runs import PROMPTS, SETTINGS, as_inputs, run, sampling, tokens
from test_gpu_engine import CHANGED
from tiny_models import make_checkpoint

from penstock.llm import LLM
from penstock.protocol.sampling import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GREEDY = [sampling()] * len(PROMPTS)
DRAWN = [sampling(temperature=0.9, seed=index) for index in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", max_position_embeddings=2048)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": False},
        {"enforce_eager": True},
        {"max_num_batched_tokens": 48},
        {"max_num_seqs": 2},
    ],
)
@pytest.mark.parametrize("params", [GREEDY, DRAWN, CHANGED])
def test_tokens_are_those_without_a_draft_model(
    qwen3: Path, params: list[SamplingParams], options: dict[str, Any]
) -> None:
    expected = tokens(run(qwen3, params, device="cuda"))
    settings = {"method": "draft_model", "model": str(qwen3), "num_speculative_tokens": 4}
    common: dict[str, Any] = {**SETTINGS, "dtype": "float32", "device": "cuda", **options}
    with LLM(str(qwen3), speculative_config={**settings, "adaptive": False}, **common) as llm:
        for _ in range(2):  # the second time with cached prefixes
            found = tokens(llm.generate(as_inputs(PROMPTS), params, use_tqdm=False))
            assert found == expected
        stats = llm.engine.scheduler.speculation.stats()
    assert stats.num_accepted_tokens > 0.8 * stats.num_draft_tokens > 20


@pytest.mark.parametrize("variant", ["mistral_windowed", "gemma2", "deepseek_v3"])
def test_a_target_with_other_attention_lends_its_block_table(
    qwen3: Path, variant: str, tmp_path: Path
) -> None:
    target = make_checkpoint(tmp_path, variant)
    expected = tokens(run(target, GREEDY, device="cuda"))
    for draft in (target, qwen3):
        settings = {"method": "draft_model", "model": str(draft), "adaptive": False}
        found = run(target, GREEDY, device="cuda", speculative_config=settings)
        assert tokens(found) == expected


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 48}])
def test_an_eagle_3_head_drafts_alike_in_graphs_and_outside(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    target = make_checkpoint(tmp_path / "target", "llama")
    head, tensors = make_head(tmp_path / "head", target)
    expected = tokens(run(target, GREEDY, device="cuda"))
    drafter = Watched(str(head), 3)
    common: dict[str, Any] = {**SETTINGS, "dtype": "float32", "device": "cuda", **options}
    with LLM(str(target), drafter=drafter, enable_prefix_caching=False, **common) as llm:
        for _ in range(3):  # the second time a step's size comes up, its graph is captured
            drafter.proposals.clear()
            found = tokens(llm.generate(as_inputs(PROMPTS), GREEDY, use_tqdm=False))
            assert found == expected
    plain = Plain(target, tensors)
    pairs = drafter.proposals[::7]
    texts = [[*prompt, *text] for prompt, text in zip(PROMPTS, expected, strict=True)]
    pairs = [pair for pair in pairs if any(t[: len(pair[0])] == pair[0] for t in texts)]
    right = [plain.drafts(known, 3) == drafts for known, drafts in pairs]
    assert sum(right) > 0.9 * len(right) > 10
