"""Drafts verified on a GPU, in float32: the tokens are those without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import Oracle, Stubborn
from gpu_runs import PROMPTS, SETTINGS, as_inputs, run, sampling, tokens
from test_gpu_engine import CHANGED, MIXED, logprobs_of, run_without_waiting
from tiny_models import make_checkpoint

from penstock.llm import LLM
from penstock.protocol.outputs import RequestOutput
from penstock.protocol.sampling import SamplingParams
from penstock.runner.drafter import Drafter
from penstock.runner.runner import ModelRunner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GREEDY = [sampling()] * len(PROMPTS)
DRAWN = [sampling(temperature=0.9, seed=index) for index in range(len(PROMPTS))]
VARIANTS = ["qwen3", "mistral_windowed", "gemma2", "gpt_oss", "llama4", "qwen3_moe", "deepseek_v3",
            "mamba2", "falcon_h1", "qwen3_next"]  # fmt: skip


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", max_position_embeddings=2048)


def oracle(outputs: list[RequestOutput], num_drafts: int) -> Oracle:
    """Right most of the time."""
    texts = [[*prompt, *found] for prompt, found in zip(PROMPTS, tokens(outputs), strict=True)]
    return Oracle(texts, wrong=3, num_drafts=num_drafts)


def runner_of(llm: LLM) -> ModelRunner:
    runner = llm.engine.executor.worker.runner  # type: ignore[attr-defined]
    assert isinstance(runner, ModelRunner)
    return runner


def widths_of(llm: LLM) -> set[int]:
    """Rows of a request in the captured decode steps."""
    return {bucket.width for bucket in runner_of(llm).steps._captured if bucket.decode}  # type: ignore[attr-defined]


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"async_scheduling": False},
                                     {"max_num_batched_tokens": 48}, {"max_num_seqs": 2},
                                     {"block_size": 64}])  # fmt: skip
@pytest.mark.parametrize("params", [GREEDY, DRAWN, MIXED, CHANGED])
def test_tokens_and_logprobs_are_those_without_drafts(
    qwen3: Path, params: list[SamplingParams], options: dict[str, Any]
) -> None:
    expected = run(qwen3, params, device="cuda")
    for num_drafts in (1, 4, 7):
        drafter = oracle(expected, num_drafts)
        found = run(qwen3, params, device="cuda", drafter=drafter, **options)
        assert tokens(found) == tokens(expected)
        for ours, theirs in zip(logprobs_of(found), logprobs_of(expected), strict=True):
            assert [token for token, _ in ours] == [token for token, _ in theirs]
            assert [value for _, value in ours] == pytest.approx(
                [value for _, value in theirs], abs=1e-3
            )
        assert drafter.num_accepted > 5


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_attention_verifies_drafts(variant: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, variant)
    expected = run(checkpoint, GREEDY, device="cuda")
    for drafter in (oracle(expected, 4), Stubborn(3)):
        found = run(checkpoint, GREEDY, device="cuda", drafter=drafter)
        assert tokens(found) == tokens(expected)


def test_long_contexts_are_split_as_for_single_tokens(qwen3: Path) -> None:
    prompts = [[1 + (index * step) % 250 for index in range(length)]
               for step, length in ((1, 1500), (3, 5), (7, 1200), (11, 333))]  # fmt: skip
    options: dict[str, Any] = {"max_model_len": 2048, "prompts": prompts}
    expected = run(qwen3, sampling(), device="cuda", **options)
    for drafter in (Stubborn(4), Stubborn(4, tokens(expected)[0][-1])):
        found = run(qwen3, sampling(), device="cuda", drafter=drafter, **options)
        assert tokens(found) == tokens(expected)


@pytest.mark.parametrize("params", [GREEDY, DRAWN])
@pytest.mark.parametrize("method", [{"method": "ngram", "prompt_lookup_min": 1},
                                    {"method": "suffix"}])  # fmt: skip
def test_drafts_found_on_the_device_are_replayed_from_graphs_without_a_wait(
    qwen3: Path, params: list[SamplingParams], method: dict[str, Any]
) -> None:
    expected = tokens(run(qwen3, params, device="cuda"))
    settings = {**method, "adaptive": False}
    options: dict[str, Any] = {**SETTINGS, "dtype": "float32", "device": "cuda"}
    with LLM(str(qwen3), speculative_config=settings, **options) as llm:
        for _ in range(3):  # the second time a step's size comes up, its graph is captured
            found = tokens(llm.generate(as_inputs(PROMPTS), params, use_tqdm=False))
            assert found == expected
        assert run_without_waiting(llm, params) == expected


def test_drafts_are_verified_in_graphs_of_their_own(qwen3: Path) -> None:
    expected = run(qwen3, GREEDY, device="cuda")
    drafter: Drafter = oracle(expected, 4)
    with LLM(str(qwen3), **SETTINGS, dtype="float32", device="cuda", drafter=drafter) as llm:
        for _ in range(2):
            llm.generate(as_inputs(PROMPTS), GREEDY, use_tqdm=False)
        assert 8 in widths_of(llm)
        sampling_graphs = runner_of(llm).head.graphs  # type: ignore[attr-defined]
        assert any(has_drafts for _, _, has_drafts in sampling_graphs._captured)
