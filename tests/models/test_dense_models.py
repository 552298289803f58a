"""Dense models: what chunks, cached prefixes, preemption, ranks and the C++ library must not
change. Their parity with transformers, alone and batched, is in test_parity."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_engine import assert_ranks_agree, greedy_tokens, open_llm, random_prompts
from tiny_models import Reference, config_of, make_checkpoint

from penstock import LLM
from penstock.config import LoadConfig, ModelConfig
from penstock.distributed.mesh import Mesh, RankGroup
from penstock.executor.in_process import InProcessExecutor
from penstock.layers.build import Build
from penstock.loading.checkpoint import open_checkpoint
from penstock.loading.load import fill_dummy, load_weights
from penstock.loading.source import resolve_source
from penstock.models.cohere import HeadsNorm
from penstock.models.registry import build_model
from penstock.ops.registry import Ops
from penstock.protocol.errors import ModelError

# By variant, which of the three layers run whole in the C++ library.
FUSED = {
    "llama": [True, True, True],
    "mistral_windowed": [True, True, True],
    "qwen2": [True, True, True],
    "qwen3": [True, True, True],
    "phi3": [True, True, True],
    "smollm3": [True, False, True],  # no positions in the second
    "olmo2": [False, False, False],
    "granite": [False, False, False],
    "glm4": [False, False, False],
    "cohere_qk_norm": [False, False, False],
    "starcoder2": [False, False, False],
    "exaone4": [False, False, False],
}
WINDOWED = {"mistral_windowed", "phi3", "starcoder2"}  # these need few blocks for a long request
PROMPTS = random_prompts(4, 3, 17, 40, 70)


def fused_layers(llm: LLM) -> list[bool]:
    executor = llm.engine.executor
    assert isinstance(executor, InProcessExecutor)
    layers = executor.worker.model.model.layers
    return [getattr(layer, "fused", None) is not None for layer in layers]


@pytest.mark.parametrize("variant", FUSED)
def test_the_engine_around_them_changes_nothing(variant: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, variant)
    with open_llm(checkpoint, enable_prefix_caching=False, max_num_seqs=1) as llm:
        alone = greedy_tokens(llm, PROMPTS)
        assert fused_layers(llm) == FUSED[variant]
    with open_llm(checkpoint, cpu_backend="torch") as llm:
        assert greedy_tokens(llm, PROMPTS) == alone
        assert fused_layers(llm) == [False, False, False]
    with open_llm(checkpoint, max_num_batched_tokens=7) as llm:  # prompts in chunks
        assert greedy_tokens(llm, PROMPTS) == alone
        assert greedy_tokens(llm, PROMPTS) == alone  # from the prefix cache
        assert llm.engine.stats().num_prefix_hits > 0
    tight = {"max_model_len": 128, "num_gpu_blocks_override": 12, "async_scheduling": True}
    if variant in WINDOWED:
        tight |= {"max_num_batched_tokens": 7, "num_gpu_blocks_override": 11, "block_size": 4}
    with open_llm(checkpoint, **tight) as llm:
        assert greedy_tokens(llm, PROMPTS) == alone
        assert llm.engine.stats().num_preemptions > 0


@pytest.mark.parametrize(
    "variant",
    [  # whose norms span ranks, or with windows
        "olmo2",
        pytest.param("cohere_qk_norm", marks=pytest.mark.slow),
        pytest.param("gemma3", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_give_one_ranks_tokens(variant: str, tmp_path: Path) -> None:
    assert_ranks_agree(make_checkpoint(tmp_path, variant), PROMPTS)


@pytest.mark.parametrize("rank", range(4))
@torch.inference_mode()
def test_a_rank_has_the_norms_of_its_heads(rank: int) -> None:
    mesh = Mesh(RankGroup(rank=rank, size=4))
    build = Build(torch.float32, torch.device("cpu"), 64, Ops("cpu"), mesh=mesh)
    weight = torch.arange(4.0)[:, None].expand(4, 8)  # a head's number
    norm = HeadsNorm(build, 4, 8, 1e-5)
    norm.load("weight", "", weight)
    assert norm.weight[:, 0].tolist() == [rank]
    shared = HeadsNorm(build, 2, 8, 1e-5)  # two ranks to a head
    shared.load("weight", "", weight[:2])
    assert shared.weight[:, 0].tolist() == [rank // 2]


def test_past_the_original_length_longrope_is_that_of_transformers(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(
        tmp_path, "phi3_longrope", original_max_position_embeddings=16, max_position_embeddings=256
    )
    reference = Reference(checkpoint)
    with open_llm(checkpoint) as llm:
        ours = greedy_tokens(llm, PROMPTS)
    for prompt, own in list(zip(PROMPTS, ours, strict=True))[1:]:  # those longer than 16
        assert reference.count_near_ties(prompt["prompt_token_ids"], own) == 0


@torch.inference_mode()
@pytest.mark.parametrize("name", ["self_attn.qkv_proj", "mlp.gate_up_proj"])
def test_a_fused_tensor_of_another_size_is_named(name: str, tmp_path: Path) -> None:
    source = resolve_source(ModelConfig(model=str(make_checkpoint(tmp_path, "phi3"))), LoadConfig())
    tensors = dict(open_checkpoint(source, LoadConfig()).tensors())
    model = build_model(source.config, Build(torch.float32, torch.device("cpu"), 64, Ops("cpu")))
    tensor = tensors[f"model.layers.1.{name}.weight"]
    tensors[f"model.layers.1.{name}.weight"] = tensor[:-1]
    rows = len(tensor)
    with pytest.raises(ModelError, match=rf"{name}.weight has shape \[{rows - 1}, .* for \[{rows}"):
        load_weights(model, model.weights, tensors.items(), len(tensors), show_progress=False)


def test_dummy_norms_are_neutral_whatever_their_kind() -> None:
    for variant in ("starcoder2", "cohere_qk_norm", "olmo2"):
        build = Build(torch.float32, torch.device("cpu"), 64, Ops("cpu"))
        model = build_model(config_of(variant), build)
        fill_dummy(model, seed=0)
        norms = {name: value for name, value in model.named_parameters() if "norm" in name}
        assert norms
        for name, value in norms.items():
            assert (value == (0.0 if name.endswith("bias") else 1.0)).all()
