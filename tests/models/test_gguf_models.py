"""A GGUF file gives the tokens of the checkpoint it was made from, for every architecture read.

The files are written here as converters write them: names from the gguf package's own tables, the
rows of queries and keys in ggml's order where llama.cpp wants that, experts in one tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_twins import TWINS, write_twin
from tiny_engine import greedy_tokens, open_llm, random_prompts
from tiny_models import Reference, make_checkpoint

from penstock.loading.gguf.architectures import ARCHITECTURES
from penstock.loading.gguf.checkpoint import GGUFCheckpoint
from penstock.loading.gguf.config import config_from_gguf
from penstock.loading.gguf.file import read_gguf
from penstock.ops.blocks import BlockTensor
from penstock.protocol.errors import ModelError

PROMPTS = random_prompts(3, 2, 21, 60)


def tokens(model: Path) -> list[list[int]]:
    with open_llm(model, max_model_len=128, kv_cache_dtype="float32") as llm:
        return greedy_tokens(llm, PROMPTS)


@pytest.mark.parametrize("twin", TWINS)
def test_a_gguf_file_gives_the_tokens_of_its_checkpoint(twin: str, tmp_path: Path) -> None:
    variant, overrides = TWINS[twin].variant, TWINS[twin].overrides
    checkpoint = make_checkpoint(tmp_path / "folder", variant, **overrides)
    path = write_twin(tmp_path / "twin.gguf", checkpoint, TWINS[twin])
    generated = tokens(path)
    assert generated == tokens(checkpoint)
    reference = Reference(checkpoint)
    for prompt, own in zip(PROMPTS, generated, strict=True):
        reference.count_near_ties(prompt["prompt_token_ids"], own)


def test_every_architecture_has_a_twin() -> None:
    older = {"llama", "qwen2", "qwen3"}  # tests/loading/test_gguf_config.py
    assert {twin.architecture for twin in TWINS.values()} | older == ARCHITECTURES.keys()


def test_experts_keep_their_blocks(tmp_path: Path) -> None:
    overrides = {**TWINS["qwen2moe"].overrides, "shared_expert_intermediate_size": 96}
    checkpoint = make_checkpoint(tmp_path / "folder", "qwen2_moe", **overrides)
    path = write_twin(tmp_path / "twin.gguf", checkpoint, TWINS["qwen2moe"], quantize="Q8_0")
    file = read_gguf(path)
    weights = dict(GGUFCheckpoint(file, config_from_gguf(file), {"Q8_0"}).tensors())
    whole = file.view("blk.1.ffn_up_exps.weight").reshape(6, -1)
    for expert in range(6):
        weight = weights[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"]
        assert isinstance(weight, BlockTensor)
        assert tuple(weight.shape) == (32, 64)
        assert np.array_equal(weight.data.numpy().reshape(-1), whole[expert])
    assert tuple(weights["model.layers.0.mlp.shared_expert_gate.weight"].shape) == (1, 64)


def config_of(tmp_path: Path, twin: str, **metadata: Any) -> dict[str, Any]:
    made = TWINS[twin]
    checkpoint = make_checkpoint(tmp_path / "folder", made.variant, **made.overrides)
    path = write_twin(tmp_path / "twin.gguf", checkpoint, made, metadata)
    return config_from_gguf(read_gguf(path))


def test_windows_that_olmo2_does_not_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="OLMo 3, which has sliding windows, is not read"):
        config_of(tmp_path, "olmo2", **{"olmo2.attention.sliding_window": 8})


def test_experts_of_another_size_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'blk\.0\.ffn_down_exps\.weight' has the shape \[6, 64"):
        config_of(tmp_path, "qwen2moe", **{"qwen2moe.expert_feed_forward_length": 48})
