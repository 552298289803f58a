"""Draft models, EAGLE and Medusa heads and MTP layers on a GPU, in float32: the tokens are those
without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import Recording
from eagle_heads import Plain, Watched, make_eagle, make_head
from gpu_runs import PROMPTS, SETTINGS, as_inputs, run, run_without_waiting, sampling, tokens
from medusa_heads import make_heads
from mtp_targets import Plain as PlainMtp
from mtp_targets import make_target
from test_gpu_engine import CHANGED
from tiny_models import make_checkpoint

from penstock.llm import LLM
from penstock.protocol.sampling import SamplingParams
from penstock.runner.drafters.draft_model import DraftModelDrafter
from penstock.runner.drafters.model import ModelDrafter
from penstock.runner.drafters.mtp import MtpDrafter
from penstock.runner.runner import ModelRunner

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


def sizes_of_graphs(llm: LLM) -> set[tuple[int, int]]:
    """Requests and drafts of the captured loops."""
    runner = llm.engine.executor.worker.runner  # type: ignore[attr-defined]
    assert isinstance(runner, ModelRunner)
    assert isinstance(runner.drafter, ModelDrafter)
    assert runner.drafter._loop is not None
    return {(size, num_drafts) for size, num_drafts, _ in runner.drafter._loop._captured}


def make_drafter(method: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A target, and keys of `speculative_config`."""
    if method == "mtp":
        return make_target(folder / "target", "glm4_moe"), {}
    target = make_checkpoint(folder / "target", "llama")
    if method == "medusa":
        return target, {"model": str(make_heads(folder / "heads", target))}
    if method == "eagle":
        return target, {"model": str(make_eagle(folder / "head", target))}
    return target, {"model": str(make_head(folder / "head", target)[0])}


@pytest.mark.parametrize("params", [GREEDY, DRAWN, CHANGED], ids=["greedy", "drawn", "changed"])
@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "medusa"])
def test_heads_draft_without_a_wait_in_graphs_of_their_own(
    method: str, params: list[SamplingParams], tmp_path: Path
) -> None:
    target, keys = make_drafter(method, tmp_path)
    expected = tokens(run(target, params, device="cuda"))
    settings = {"method": method, "num_speculative_tokens": 3, "adaptive": False, **keys}
    common: dict[str, Any] = {**SETTINGS, "dtype": "float32", "device": "cuda"}
    with LLM(str(target), speculative_config=settings, **common) as llm:
        for _ in range(3):  # the second time a step's size comes up, its graph is captured
            found = tokens(llm.generate(as_inputs(PROMPTS), params, use_tqdm=False))
            assert found == expected
        if params is not CHANGED:
            assert run_without_waiting(llm, params) == expected
            assert method == "medusa" or {drafts for _, drafts in sizes_of_graphs(llm)} == {3}
        assert llm.engine.scheduler.speculation.stats().num_draft_tokens > 100


class RecordingMtp(Recording, MtpDrafter):
    pass


@pytest.mark.parametrize(
    ("variant", "num_layers"),
    [("glm4_moe", 1), ("deepseek_v3", 1), ("mimo", 1), ("mimo", 2), ("deepseek_v3", 3)],
)
def test_mtp_layers_draft_what_a_plain_computation_says(
    variant: str, num_layers: int, tmp_path: Path
) -> None:
    target = make_target(tmp_path, variant, num_layers)
    expected = tokens(run(target, GREEDY, device="cuda"))
    drafter = RecordingMtp(3)
    common: dict[str, Any] = {**SETTINGS, "dtype": "float32", "device": "cuda"}
    with LLM(str(target), drafter=drafter, enable_prefix_caching=False, **common) as llm:
        for _ in range(3):
            drafter.proposals.clear()
            found = tokens(llm.generate(as_inputs(PROMPTS), GREEDY, use_tqdm=False))
            assert found == expected
    plain = PlainMtp(target, variant)
    texts = [[*prompt, *text] for prompt, text in zip(PROMPTS, expected, strict=True)]
    pairs = [pair for pair in drafter.proposals[::7]
             if any(t[: len(pair[0])] == pair[0] for t in texts)]  # fmt: skip
    right = [plain.drafts(known, 3) == drafts for known, drafts in pairs]
    assert sum(right) > 0.9 * len(right) > 10


class Waiting(DraftModelDrafter):
    """Counts how often it waits for the device."""

    num_waits = num_steps = 0

    def _known(self, batch: Any) -> Any:
        self.num_waits += 1
        return super()._known(batch)

    def propose(self, step: Any) -> Any:
        self.num_steps += 1
        return super().propose(step)


def test_a_draft_model_waits_only_when_a_request_begins(qwen3: Path) -> None:
    expected = tokens(run(qwen3, DRAWN, device="cuda"))
    drafter = Waiting(str(qwen3), 3)
    common: dict[str, Any] = {**SETTINGS, "dtype": "float32", "device": "cuda"}
    with LLM(str(qwen3), drafter=drafter, **common) as llm:
        for _ in range(3):
            found = tokens(llm.generate(as_inputs(PROMPTS), DRAWN, use_tqdm=False))
            assert found == expected
        assert sizes_of_graphs(llm)
    assert drafter.num_waits <= 3 * len(PROMPTS) < drafter.num_steps
