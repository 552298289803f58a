"""An EAGLE head drafts what a plain computation of it says, and never changes the output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from drafters import Recording
from eagle_heads import PlainEagle, make_eagle, make_head
from safetensors.torch import load_file
from sampling_kinds import KINDS
from tiny_engine import open_llm, random_prompts, tokens_and_logprobs

from penstock import SamplingParams
from penstock.protocol.errors import ConfigError, ModelError
from penstock.runner.drafters.eagle import EagleDrafter

PROMPTS = random_prompts("eagle", 1, 9, 40, 90)


class Watched(Recording, EagleDrafter):
    pass


@pytest.mark.parametrize("extras", [False, True], ids=["bare", "with all that some have"])
def test_drafts_are_those_of_a_plain_computation(
    tiny_llama: str, tmp_path: Path, extras: bool
) -> None:
    head = make_eagle(tmp_path / "head", Path(tiny_llama), extras)
    plain = PlainEagle(Path(tiny_llama), load_file(head / "model.safetensors"))
    drafter = Watched(str(head), 3)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    options = {"enable_prefix_caching": False, "dtype": "float32", "max_num_batched_tokens": 16}
    with open_llm(tiny_llama, drafter=drafter, max_num_seqs=3, **options) as llm:
        llm.generate(PROMPTS, greedy, use_tqdm=False)
    assert len(drafter.proposals) > 30
    for known, drafts in drafter.proposals:
        assert drafts == plain.drafts(known, 3), known


@pytest.mark.parametrize("extras", [False, True])
def test_heads_of_the_speculators_library_are_the_same(
    tiny_llama: str, tmp_path: Path, extras: bool
) -> None:
    proposals = []
    for speculators in (False, True):
        head = make_eagle(tmp_path / str(speculators), Path(tiny_llama), extras, speculators)
        drafter = Watched(str(head), 3)
        with open_llm(tiny_llama, drafter=drafter) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=8)
            llm.generate(PROMPTS, params, use_tqdm=False)
        proposals.append(drafter.proposals)
    assert proposals[0] == proposals[1]


@pytest.mark.parametrize(
    "options",
    [{}, {"num_gpu_blocks_override": 14, "block_size": 16}, {"async_scheduling": True}],
    ids=["plain", "preemption", "two in flight"],
)
def test_tokens_and_logprobs_are_those_without_a_head(
    tiny_llama: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    head = make_eagle(tmp_path / "head", Path(tiny_llama))
    kinds = [SamplingParams(max_tokens=24, logprobs=2, **kind) for kind in KINDS.values()]
    config = {"method": "eagle", "model": str(head), "adaptive": False}
    with open_llm(tiny_llama) as llm:
        expected = [tokens_and_logprobs(llm, PROMPTS, params) for params in kinds]
    with open_llm(tiny_llama, speculative_config=config, **options) as llm:
        for _ in range(2):  # the second time from the prefix cache
            assert [tokens_and_logprobs(llm, PROMPTS, params) for params in kinds] == expected
        assert llm.engine.speculation_stats().num_draft_tokens > 100


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"vocab_size": 300}, ConfigError, "EAGLE head .* vocab_size 300, this one's is 256"),
        ({"num_hidden_layers": 2}, ModelError, "num_hidden_layers of an EAGLE head must be 1"),
        ({"layernorms": True}, ModelError, "layernorms must be False, got True"),
    ],
)
def test_a_head_for_another_target_is_refused(
    tiny_llama: str, tmp_path: Path, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    head = make_eagle(tmp_path / "head", Path(tiny_llama), **changes)
    with pytest.raises(error, match=text):
        open_llm(tiny_llama, speculative_config={"method": "eagle", "model": str(head)})


def test_other_checkpoints_are_refused_with_their_method(tiny_llama: str, tmp_path: Path) -> None:
    third, _ = make_head(tmp_path / "head", Path(tiny_llama))
    first = make_eagle(tmp_path / "first", Path(tiny_llama), speculators=True)
    for method, model, text in (
        ("eagle", third, "use method eagle3"),
        ("eagle", tiny_llama, "use method draft_model"),
        ("eagle3", first, "is not an EAGLE-3 head: use method eagle$"),
    ):
        with pytest.raises(ConfigError, match=text):
            open_llm(tiny_llama, speculative_config={"method": method, "model": str(model)})
