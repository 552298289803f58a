"""Medusa heads draft what a plain computation of them says, and never change the output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from medusa_heads import FORMATS, NUM_HEADS, Plain, Watched, make_heads
from safetensors.torch import load_file, save_file
from sampling_kinds import KINDS
from tiny_engine import open_llm, random_prompts, tokens_and_logprobs

from penstock import LLM, SamplingParams
from penstock.protocol.errors import ConfigError, ModelError

PROMPTS = random_prompts("medusa", 1, 9, 40, 90)


def run(llm: LLM) -> list[Any]:
    kinds = [SamplingParams(max_tokens=24, logprobs=2, **kind) for kind in KINDS.values()]
    return [tokens_and_logprobs(llm, PROMPTS, params) for params in kinds]


@pytest.mark.parametrize("form", FORMATS)
def test_drafts_are_those_of_a_plain_computation(
    tiny_llama: str, tmp_path: Path, form: str
) -> None:
    heads = make_heads(tmp_path / "heads", Path(tiny_llama), form)
    plain, drafter = Plain(Path(tiny_llama), heads), Watched(str(heads), NUM_HEADS)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    chunks = {"max_num_batched_tokens": 16, "max_num_seqs": 3}
    with open_llm(tiny_llama, drafter=drafter, dtype="float32", **chunks) as llm:
        for _ in range(2):  # the second time from the prefix cache
            llm.generate(PROMPTS, greedy, use_tqdm=False)
    assert len(drafter.proposals) > 60
    for known, drafts in drafter.proposals:
        assert drafts == plain.drafts(known, NUM_HEADS), known


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True},
        {"num_gpu_blocks_override": 14, "block_size": 16, "max_model_len": 160},
    ],
    ids=["plain", "two in flight", "preemption"],
)
def test_tokens_and_logprobs_are_those_without_heads(
    tiny_llama: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    heads = make_heads(tmp_path / "heads", Path(tiny_llama))
    config = {"method": "medusa", "model": str(heads), "adaptive": False}
    with open_llm(tiny_llama) as llm:
        expected = run(llm)
    with open_llm(tiny_llama, speculative_config=config, **options) as llm:
        assert [run(llm), run(llm)] == [expected] * 2
        assert llm.engine.speculation_stats().num_draft_tokens > 100


@pytest.mark.parametrize(
    ("changes", "settings", "error", "text"),
    [
        ({"vocab_size": 300}, {}, ModelError, r"asks for \[300, "),
        ({"hidden_size": 48}, {}, ModelError, "asks for .*48"),
        ({"medusa_num_heads": None}, {}, ConfigError, "not a Medusa checkpoint.*medusa_num_heads"),
        ({}, {"num_speculative_tokens": 4}, ConfigError, "at most 3, the number of heads"),
        ({"medusa_num_layers": 0}, {}, ModelError, "num_layers must be an integer of at least 1"),
    ],
    ids=["vocabulary", "size", "not heads", "too many drafts", "no layers"],
)
def test_heads_that_do_not_fit_are_refused(
    tiny_llama: str,
    tmp_path: Path,
    changes: dict[str, Any],
    settings: dict[str, Any],
    error: type[Exception],
    text: str,
) -> None:
    heads = make_heads(tmp_path / "heads", Path(tiny_llama), **changes)
    config = {"method": "medusa", "model": str(heads), **settings}
    with pytest.raises(error, match=text):
        open_llm(tiny_llama, speculative_config=config)


def test_heads_of_another_target_are_refused(tiny_llama: str, tmp_path: Path) -> None:
    from tiny_models import make_checkpoint

    other = make_checkpoint(tmp_path / "other", "llama", vocab_size=300)
    heads = make_heads(tmp_path / "heads", other, "vllm")
    with pytest.raises(ConfigError, match="for a target with vocab_size 300, this one's is 256"):
        open_llm(tiny_llama, speculative_config={"method": "medusa", "model": str(heads)})


def test_tokens_outside_the_vocabulary_are_refused(tiny_llama: str, tmp_path: Path) -> None:
    heads = make_heads(tmp_path / "heads", Path(tiny_llama), "vllm with few tokens")
    path = heads / "medusa_lm_head.safetensors"
    tensors = load_file(path)
    tensors["token_map"][0] = 256
    save_file(tensors, path)
    with pytest.raises(ModelError, match="token_map: it names tokens outside the vocabulary"):
        open_llm(tiny_llama, speculative_config={"method": "medusa", "model": str(heads)})
