"""Drafters with layers on the way of a GPU, without one: the loop's kernels are interpreted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import Recording
from mtp_targets import Plain as PlainMtp
from mtp_targets import make_target
from tiny_models import make_checkpoint

from penstock import LLM
from penstock.ops import registry
from penstock.runner.drafters.draft_model import DraftModelDrafter
from penstock.runner.drafters.model import ModelDrafter
from penstock.runner.drafters.mtp import MtpDrafter

pytest.importorskip("triton", reason="needs Triton")

from device_parts import OPTIONS, PROMPTS, SHAPE, generate, sampling, take_device_path
from test_device_path import HYBRID

from penstock.ops.triton.drafting import draft_rows
from penstock.runner.drafters.loop import DraftLoop

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled for the GPU there: see tests/gpu"
)

GREEDY = [sampling(5, temperature=0.0)] * 2
DRAWN = [sampling(7, temperature=0.0), sampling(7, temperature=0.9, seed=4)]
CHANGED = [sampling(7, temperature=0.0), sampling(7, temperature=0.7, repetition_penalty=1.3)]
COMMON: dict[str, Any] = {**OPTIONS, "block_size": 4, "dtype": "float32"}


class RecordingModel(Recording, DraftModelDrafter):
    """Counts how often it waited for the device to tell what is missing."""

    num_waits = 0

    def _known(self, batch: Any) -> Any:
        self.num_waits += 1
        return super()._known(batch)


class RecordingMtp(Recording, MtpDrafter):
    pass


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of requests of each call of the loop."""
    sizes: list[int] = []
    run = DraftLoop._run

    def watched(self: DraftLoop, size: int, *args: Any) -> torch.Tensor:
        sizes.append(size)
        return run(self, size, *args)

    monkeypatch.setattr(DraftLoop, "_run", watched)
    return sizes


def draft(
    target: Path, drafter: ModelDrafter, params: Any, monkeypatch: pytest.MonkeyPatch
) -> list[list[int]]:
    with LLM(str(target), **COMMON) as llm:
        expected = generate(llm, params)
    with monkeypatch.context() as patch:
        patch.setitem(registry.BACKENDS, "cpu", registry.BACKENDS["cuda"])
        with LLM(str(target), drafter=drafter, enable_prefix_caching=False, **COMMON) as llm:
            take_device_path(llm, drafter)
            assert generate(llm, params) == expected
    return expected


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_mtp_layers_draft_on_the_way_of_a_gpu_as_plainly(
    num_layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: list[int]
) -> None:
    target = make_target(tmp_path, "mimo", num_layers)
    drafter = RecordingMtp(3)
    with monkeypatch.context() as patch:
        patch.setitem(registry.BACKENDS, "cpu", registry.BACKENDS["cuda"])
        with LLM(str(target), drafter=drafter, enable_prefix_caching=False, **COMMON) as llm:
            take_device_path(llm, drafter, vocab_size=256)
            generate(llm, GREEDY)
    plain = PlainMtp(target, "mimo")
    assert len(served) > 4
    right = [plain.drafts(known, 3) == drafts for known, drafts in drafter.proposals]
    assert sum(right) > 0.9 * len(right) > 6, "near ties may fall the other way"


@pytest.mark.parametrize(
    "params",
    [pytest.param(DRAWN, id="drawn", marks=pytest.mark.slow), pytest.param(CHANGED, id="changed")],
)
def test_a_model_that_drafts_for_itself_is_right_and_seldom_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: list[int], params: Any
) -> None:
    target = make_checkpoint(tmp_path, "llama", **SHAPE)
    drafter = RecordingModel(str(target), 3)
    expected = draft(target, drafter, params, monkeypatch)
    num_right, num_drafts = judge(drafter, expected)
    assert num_right == num_drafts > 6
    if params is CHANGED:
        assert not served, "penalties need more than the loop has"
    else:
        assert drafter.num_waits <= 2 < len(served)  # each request may begin in its own step


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["mamba2", "qwen3_next"])
def test_a_recurrent_model_that_drafts_for_itself_is_right(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: list[int]
) -> None:
    target = make_checkpoint(tmp_path, variant, **{**SHAPE, **HYBRID[variant]})
    drafter = RecordingModel(str(target), 3)
    expected = draft(target, drafter, DRAWN, monkeypatch)
    assert len(served) > 2
    num_right, num_drafts = judge(drafter, expected)
    assert num_right == num_drafts > 6


def judge(drafter: RecordingModel, expected: list[list[int]]) -> tuple[int, int]:
    """How many drafts were right, of those for positions of the texts."""
    num_right = num_drafts = 0
    for known, drafts in drafter.proposals:
        text = next(t for t in texts(expected) if t[: len(known)] == known[: len(t)])
        pairs = [*zip(drafts, text[len(known) :], strict=False)]
        num_drafts += len(pairs)
        num_right += sum(ours == theirs for ours, theirs in pairs)
    return num_right, num_drafts


def texts(outputs: list[list[int]]) -> list[list[int]]:
    prompts = [prompt["prompt_token_ids"] for prompt in PROMPTS]
    return [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]


def test_rows_without_a_place_use_the_null_block() -> None:
    """Of four requests, one is padding, one has no block for the row, one is at the end."""
    token_table = torch.arange(40, dtype=torch.int32).view(4, 10)
    num_tokens = torch.tensor([3, 5, 8, 1], dtype=torch.int32)
    block_table = torch.tensor([[5, 6, 7], [8, 9, 3], [1, 2, 4], [7, 7, 7]], dtype=torch.int32)
    slots, room = torch.tensor([0, 1, 2, -1]), torch.tensor([12, 4, 8, -1])
    ints = [torch.full((4,), 9, dtype=torch.int32) for _ in range(2)]
    longs = [torch.full((4,), 9) for _ in range(3)]
    rows_table = torch.full((4, 3), 9, dtype=torch.int32)
    (token_ids, seq_lens), (positions, following, mapping) = ints, longs

    def lay_out(drafted: torch.Tensor | None, index: int) -> None:
        draft_rows(
            slots, room, drafted, token_table, num_tokens, block_table, 4, index, 3, 8,
            token_ids, positions, following, mapping, seq_lens, rows_table,
        )  # fmt: skip

    lay_out(None, 0)
    assert token_ids.tolist() == [2, 14, 27, 0]
    assert positions.tolist() == [2, 4, 7, 0]
    assert following.tolist() == [3, 5, 8, 1]
    assert mapping.tolist() == [5 * 4 + 2, 0, 2 * 4 + 3, 0]
    assert seq_lens.tolist() == [3, 5, 8, 1]
    assert rows_table[:3, :2].tolist() == [[5, 6], [8, 0], [1, 2]]
    assert rows_table[3, 0] == 0
    lay_out(torch.tensor([31, 32, 33, 34]), 2)
    assert token_ids.tolist() == [31, 32, 33, 0]
    assert positions.tolist() == [4, 6, 7, 2]  # no position is past the end
    assert following.tolist() == [5, 7, 10, 3]
    assert mapping.tolist() == [6 * 4, 0, 0, 0]
    assert seq_lens.tolist() == [5, 7, 8, 1]
