"""MTP layers draft what a plain computation of them says, and never change the output."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import Recording
from mtp_targets import TARGETS, Plain, make_target
from safetensors.torch import load_file, save_file
from tiny_engine import open_llm
from tiny_models import make_checkpoint

from penstock import LLM, SamplingParams
from penstock.protocol.errors import ConfigError
from penstock.runner.drafters.mtp import KEY, MtpDrafter


class Watched(Recording, MtpDrafter):
    pass


def run(llm: LLM, **options: Any) -> list[list[int]]:
    rng = random.Random(7)
    prompts = [
        {"prompt_token_ids": [rng.randrange(256) for _ in range(length)]} for length in (1, 9, 40)
    ]
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **options})
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]


HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"]
}


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        *((each, {}) for each in TARGETS),
        ("qwen3_next", HYBRID),
        ("deepseek_v3", {"num_mtp_layers": 3}),
        ("mimo", {"num_mtp_layers": 2}),  # the first makes the last draft, too
        *(
            pytest.param(each, {"num_mtp_layers": 2}, marks=pytest.mark.slow)
            for each in TARGETS
            if each != "mimo"
        ),
    ],
)
def test_drafts_are_those_of_a_plain_computation(
    variant: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    target = make_target(tmp_path, variant, **settings)
    drawn = {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.1}
    with open_llm(target) as llm:
        expected = [run(llm), run(llm, **drawn)]
    plain, drafter = Plain(target, variant), Watched(3)
    chunks = {"max_num_batched_tokens": 16, "max_num_seqs": 3, "enable_prefix_caching": False}
    with open_llm(target, drafter=drafter, **chunks) as llm:
        assert run(llm) == expected[0]
    assert len(drafter.proposals) > 20
    right = [plain.drafts(known, 3) == drafts for known, drafts in drafter.proposals]
    assert sum(right) > 0.9 * len(right), "near ties may fall the other way"
    config = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
    with open_llm(target, speculative_config=config) as llm:
        for _ in range(2):  # the second time from the prefix cache
            assert [run(llm), run(llm, **drawn)] == expected
        assert llm.engine.speculation_stats().num_draft_tokens > 50


def make_right(folder: Path, num_layers: int) -> Path:
    """A model that counts, and MTP layers that are right if each takes the turn that is its own.

    Nothing is added to the embeddings, so a hidden state is that of its token. MTP layer i moves
    the i-th share of a hidden state on by one token, into the next share. The output head reads
    them all.
    """
    target = make_target(folder, "mimo", num_layers)
    config = json.loads((target / "config.json").read_text())
    size, vocab_size = config["hidden_size"], config["vocab_size"]
    width = size // (num_layers + 1) // 2 * 2
    angles = torch.arange(vocab_size)[:, None] * torch.arange(1, width // 2 + 1)
    angles = angles * (2 * torch.pi / vocab_size)
    points = torch.stack([angles.cos(), angles.sin()], dim=-1).flatten(
        1
    )  # of tokens: [vocab, width]
    following = points.roll(-1, 0)
    move = torch.linalg.lstsq(points, following).solution.T  # of a token's point to the next one's
    path = target / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "input_proj.weight")):
            tensor.zero_()
        elif "norm" in name:
            tensor.fill_(1)
    embedding = torch.zeros(vocab_size, size)
    embedding[:, :width] = points
    tensors["model.embed_tokens.weight"] = embedding
    tensors["lm_head.weight"] = torch.zeros(vocab_size, size)
    for share in range(num_layers + 1):
        own = slice(share * width, (share + 1) * width)
        tensors["lm_head.weight"][:, own] = points.roll(1, 0)
        if share < num_layers:
            onto = slice(own.stop, own.stop + width)
            projection = tensors[f"model.mtp_layers.{share}.input_proj.weight"]
            projection[onto, own] = move  # the hidden state comes before the embedding
    save_file(tensors, path, metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 3}])
def test_drafts_of_layers_that_are_right_are_all_accepted(
    options: dict[str, Any], tmp_path: Path
) -> None:
    target = make_right(tmp_path, 3)
    config = {"method": "mtp", "adaptive": False}
    with open_llm(target, speculative_config=config, **options) as llm:
        assert llm.engine.limits.num_drafts == 3, "one of each layer, unless told otherwise"
        for tokens in run(llm, max_tokens=13):
            assert tokens == [(tokens[0] + i) % 256 for i in range(13)]
        found = llm.engine.speculation_stats()
    assert found.num_accepted_tokens == found.num_draft_tokens == 3 * 3 * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"enable_eplb": True, "eplb_config": {"num_redundant_experts": 2}}]
)
def test_replicas_that_share_experts_draft_by_themselves(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Their requests end at different steps, and in the second run one has none."""
    target = make_target(tmp_path, "glm4_moe")
    with open_llm(target) as llm:
        expected = run(llm)
    config = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
    options = {**options, "data_parallel_size": 2, "enable_expert_parallel": True}
    with open_llm(target, speculative_config=config, **options) as llm:
        assert run(llm) == expected
        params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        (alone,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
        assert len(alone.outputs[0].token_ids) == 30
        assert llm.engine.speculation_stats().num_draft_tokens > 50


def test_models_without_mtp_layers_are_refused(tiny_llama: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mtp is not supported for LlamaForCausalLM"):
        open_llm(tiny_llama, speculative_config={"method": "mtp"})
    for declared, text in (
        (0, "has no MTP layer"),
        (1, f"cannot be loaded .*lacks .*eh_proj.* {KEY} 1: use draft_model"),
        (2, f"2 MTP layers .*lacks .*eh_proj.* {KEY} 2: lower num_speculative_tokens"),
    ):
        folder = tmp_path / str(declared)
        target = make_checkpoint(folder, "glm4_moe", num_nextn_predict_layers=declared)
        with pytest.raises(ConfigError, match=text):
            open_llm(target, speculative_config={"method": "mtp"})


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_the_mtp_layer_is_quantized_like_the_others(quantization: str, tmp_path: Path) -> None:
    target = make_target(tmp_path, "glm4_moe")
    settings = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
    with open_llm(target, quantization=quantization, speculative_config=settings) as llm:
        assert [len(tokens) for tokens in run(llm)] == [12] * 3
        assert llm.engine.speculation_stats().num_draft_tokens > 20
