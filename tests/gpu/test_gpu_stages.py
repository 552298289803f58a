"""Pipeline stages on one GPU, one after the other in this process: the graphs of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import Oracle
from eagle_heads import make_eagle, make_head
from gpu_runs import PROMPTS, SETTINGS, as_inputs, run, run_without_waiting, sampling, tokens
from mtp_targets import make_target
from stages import executor_of, local_stages, stages_of
from test_gpu_engine import CHANGED, MIXED
from tiny_models import make_checkpoint

from penstock.executor import worker
from penstock.llm import LLM
from penstock.protocol.sampling import SamplingParams
from penstock.runner.device_batch import Bucket
from penstock.runner.device_steps import DeviceSteps

__all__ = ["local_stages"]
pytestmark = [
    pytest.mark.usefixtures("local_stages"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

GREEDY = [sampling()] * len(PROMPTS)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=3)


def open_stages(checkpoint: Path, **options: Any) -> LLM:
    common = {**SETTINGS, "dtype": "float32", "device": "cuda", "pipeline_parallel_size": 2}
    return LLM(str(checkpoint), **{**common, **options})


def generate(llm: LLM, params: Sequence[SamplingParams]) -> list[list[int]]:
    return tokens(llm.generate(as_inputs(PROMPTS), list(params), use_tqdm=False))


def captured(llm: LLM) -> list[set[Bucket]]:
    """The graphs of each stage."""
    found = []
    for stage in stages_of(llm):
        assert stage.runner is not None
        assert isinstance(stage.runner.steps, DeviceSteps)
        found.append(set(stage.runner.steps._captured))
    return found


def assert_graphs_ran(llm: LLM) -> None:
    """On every stage, in most steps."""
    for steps, buckets in zip(executor_of(llm).metrics, captured(llm), strict=True):
        assert steps["graph_steps"] > steps["eager_steps"] > 0
        assert any(bucket.decode for bucket in buckets)


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("params", [GREEDY, MIXED, CHANGED])
def test_stages_with_graphs_give_one_ranks_tokens(
    qwen3: Path, params: list[SamplingParams], num_stages: int
) -> None:
    expected = tokens(run(qwen3, params, device="cuda"))
    with open_stages(qwen3, pipeline_parallel_size=num_stages) as llm:
        assert generate(llm, params) == expected
        assert generate(llm, params) == expected, "with cached prefixes"
        assert_graphs_ran(llm)


@pytest.mark.parametrize("options", [{"enforce_eager": True}, {"max_num_batched_tokens": 48},
                                     {"max_num_seqs": 3}])  # fmt: skip
def test_stages_give_one_ranks_tokens_with_other_options(
    qwen3: Path, options: dict[str, Any]
) -> None:
    expected = tokens(run(qwen3, MIXED, device="cuda"))
    with open_stages(qwen3, **options) as llm:
        assert generate(llm, MIXED) == expected
        assert any(captured(llm)) == ("enforce_eager" not in options)


@pytest.mark.parametrize("variant", ["qwen3_moe", "deepseek_v3", "gemma3", "gpt_oss", "qwen3_next"])
def test_other_layers_in_stages_give_one_ranks_tokens(variant: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, variant)
    expected = tokens(run(checkpoint, MIXED, device="cuda"))
    with open_stages(checkpoint) as llm:
        assert generate(llm, MIXED) == expected
        assert_graphs_ran(llm)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_stages_verify_drafts_with_graphs(method: str, qwen3: Path, tmp_path: Path) -> None:
    checkpoint = make_target(tmp_path / "model", "glm4_moe") if method == "mtp" else qwen3
    settings: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    if method == "eagle":
        settings["model"] = str(make_eagle(tmp_path / "head", checkpoint))
    elif method == "eagle3":
        settings["model"] = str(make_head(tmp_path / "head", checkpoint)[0])
    for params in (GREEDY, MIXED):
        expected = tokens(run(checkpoint, params, device="cuda"))
        with open_stages(checkpoint, speculative_config=settings) as llm:
            assert generate(llm, params) == expected
            assert_graphs_ran(llm)
            for buckets in captured(llm):
                assert any(bucket.decode and bucket.width > 1 for bucket in buckets)
            assert llm.engine.speculation_stats().num_draft_tokens > 0


@pytest.mark.parametrize("variant", ["mamba2", "falcon_h1", "qwen3_next"])
def test_recurrent_layers_in_stages_go_on_from_accepted_drafts(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Early stages learn which ones while the next step, of other requests, is in flight."""
    checkpoint = make_checkpoint(tmp_path, variant)
    expected = tokens(run(checkpoint, GREEDY, device="cuda"))
    texts = [[*prompt, *own] for prompt, own in zip(PROMPTS, expected, strict=True)]
    monkeypatch.setattr(worker, "make_drafter", lambda *_: Oracle(texts, 1, 3, wrong_every=3))
    settings = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    with open_stages(checkpoint, speculative_config=settings) as llm:
        for _ in range(2):
            assert generate(llm, GREEDY) == expected
        assert_graphs_ran(llm)
        stats = llm.engine.speculation_stats()
    assert stats.num_draft_tokens > stats.num_accepted_tokens > stats.num_drafts


def test_no_step_of_a_steady_state_waits_for_the_device(qwen3: Path) -> None:
    with open_stages(qwen3) as llm:
        for _ in range(3):  # the second time a step's size comes up, its graph is captured
            expected = generate(llm, GREEDY)
        assert run_without_waiting(llm, GREEDY) == expected
