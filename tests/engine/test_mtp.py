"""MTP layers draft what a plain computation of them says, and never change the output."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import Recording
from mtp_targets import KINDS, MTP, NUM_LAYERS, make_target
from safetensors.torch import load_file
from tiny_engine import open_llm
from tiny_models import make_checkpoint
from torch.nn import functional

from penstock import LLM, SamplingParams
from penstock.protocol.errors import ConfigError
from penstock.runner.drafters.mtp import MtpDrafter


class Plain:
    """transformers' model of one layer more, whose layers run one by one over the whole text."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder)
        config.num_hidden_layers = NUM_LAYERS + 1
        if hasattr(config, "mlp_layer_types"):
            config.mlp_layer_types = KINDS
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32
        ).eval()
        self.tensors = load_file(folder / "model.safetensors")
        self.eps = config.rms_norm_eps

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], self.eps)

    def layer(self, index: int, x: torch.Tensor) -> torch.Tensor:
        inner = self.model.model
        positions = torch.arange(len(x))[None]
        angles = inner.rotary_emb(x[None], positions)
        out = inner.layers[index](x[None], position_ids=positions, position_embeddings=angles)
        return (out[0] if isinstance(out, tuple) else out).view_as(x)

    @torch.inference_mode()
    def drafts(self, token_ids: list[int], count: int) -> list[int]:
        embed = self.model.get_input_embeddings()
        x = rows = embed(torch.tensor(token_ids))
        for index in range(NUM_LAYERS):
            x = self.layer(index, x)
        states = self.norm(x, "model.norm")
        before = torch.cat([torch.zeros_like(states[:1]), states[:-1]])
        drafts: list[int] = []
        for _ in range(count):
            pair = [self.norm(rows, f"{MTP}.enorm"), self.norm(before, f"{MTP}.hnorm")]
            x = torch.cat(pair, dim=-1) @ self.tensors[f"{MTP}.eh_proj.weight"].T
            last = self.layer(NUM_LAYERS, x)[-1:]
            logits = self.norm(last, f"{MTP}.shared_head.norm") @ self.tensors["lm_head.weight"].T
            drafts.append(int(logits.argmax()))
            rows = torch.cat([rows, embed(torch.tensor(drafts[-1:]))])
            before = torch.cat([before, last])
        return drafts


class Watched(Recording, MtpDrafter):
    pass


def run(llm: LLM, **options: Any) -> list[list[int]]:
    rng = random.Random(7)
    prompts = [
        {"prompt_token_ids": [rng.randrange(256) for _ in range(length)]} for length in (1, 9, 40)
    ]
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **options})
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("variant", ["glm4_moe", "deepseek_v3", "glm4_moe_lite"])
def test_drafts_are_those_of_a_plain_computation(variant: str, tmp_path: Path) -> None:
    target = make_target(tmp_path, variant)
    drawn = {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.1}
    with open_llm(target) as llm:
        expected = [run(llm), run(llm, **drawn)]
    plain, drafter = Plain(target), Watched(3)
    chunks = {"max_num_batched_tokens": 16, "max_num_seqs": 3, "enable_prefix_caching": False}
    with open_llm(target, drafter=drafter, **chunks) as llm:
        assert run(llm) == expected[0]
    assert len(drafter.proposals) > 20
    right = [plain.drafts(known, 3) == drafts for known, drafts in drafter.proposals]
    assert sum(right) > 0.9 * len(right), "near ties may fall the other way"
    settings = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
    with open_llm(target, speculative_config=settings) as llm:
        for _ in range(2):  # the second time from the prefix cache
            assert [run(llm), run(llm, **drawn)] == expected
        assert llm.engine.speculation_stats().num_draft_tokens > 50


def test_models_without_mtp_layers_are_refused(tiny_llama: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mtp is not supported for LlamaForCausalLM"):
        open_llm(tiny_llama, speculative_config={"method": "mtp"})
    for declared, text in ((0, "has no MTP layer"), (1, r"cannot be loaded .*lacks .*eh_proj")):
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
