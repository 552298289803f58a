"""Models that transformers' own code runs, with Penstock's attention and cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_engine import greedy_tokens, open_llm, random_prompts
from tiny_models import Reference, make_checkpoint
from tiny_variants import OUTSIDE
from transformers import masking_utils

from penstock import LLM, SamplingParams
from penstock.distributed.mesh import Mesh, RankGroup
from penstock.executor.in_process import InProcessExecutor
from penstock.kvcache.layout import blocks_for_request, plan_groups
from penstock.layers.build import Build
from penstock.loading.load import fill_dummy
from penstock.models import registry
from penstock.models.architectures import ARCHITECTURES, RUN_BY_TRANSFORMERS
from penstock.models.registry import build_model
from penstock.models.transformers_model import TransformersLM
from penstock.models.transformers_modules import BatchedLinear
from penstock.models.transformers_probe import CausalMask, Unsupported, describe_mask
from penstock.ops.registry import Ops
from penstock.protocol.errors import ConfigError, ModelError

PROMPTS = random_prompts(11, 1, 9, 33, 70)


def model_of(llm: LLM) -> TransformersLM:
    executor = llm.engine.executor
    assert isinstance(executor, InProcessExecutor)
    model = executor.worker.model
    assert isinstance(model, TransformersLM)
    return model


def tiny_build(**options: Any) -> Build:
    return Build(torch.float32, torch.device("cpu"), 64, Ops("cpu"), **options)


def config_of(name: str, **settings: Any) -> dict[str, Any]:
    """The config.json of a small model."""
    common = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**{**common, **settings})
    raw: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {**raw, "architectures": [f"{name}ForCausalLM"]}


def test_the_table_names_the_checkpoints_that_are_compared() -> None:
    compared: dict[str, tuple[str, ...]] = {}
    for variant, (name, _) in OUTSIDE.items():
        compared[f"{name}ForCausalLM"] = (*compared.get(f"{name}ForCausalLM", ()), variant)
    assert compared == RUN_BY_TRANSFORMERS
    assert not RUN_BY_TRANSFORMERS.keys() & ARCHITECTURES.keys()


@pytest.mark.parametrize("variant", OUTSIDE)
def test_greedy_tokens_equal_transformers_however_they_are_computed(
    variant: str, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(tmp_path, variant)
    with open_llm(checkpoint, enable_prefix_caching=False, max_num_seqs=1) as llm:
        alone = greedy_tokens(llm, PROMPTS)
        model = model_of(llm)
        assert any(isinstance(module, BatchedLinear) for module in model.modules())
        specs = model.kv_specs("float32")
    reference = Reference(checkpoint)
    num_ties = 0
    for prompt, own in zip(PROMPTS, alone, strict=True):
        num_ties += reference.count_near_ties(prompt["prompt_token_ids"], own)
    assert num_ties <= 1
    with open_llm(checkpoint, max_num_batched_tokens=7) as llm:  # prompts in chunks
        assert greedy_tokens(llm, PROMPTS) == alone
        assert greedy_tokens(llm, PROMPTS) == alone  # from the prefix cache
        assert llm.engine.stats().num_prefix_hits > 0
    groups, _ = plan_groups(specs, block_size=4, max_model_len=128)
    num_blocks = blocks_for_request(groups, 128, max_step_tokens=16) + 2  # hardly for another
    tight = {
        "num_gpu_blocks_override": num_blocks, "max_num_batched_tokens": 16, "block_size": 4,
        "max_model_len": 128,
    }  # fmt: skip
    with open_llm(checkpoint, cpu_backend="torch", async_scheduling=True, **tight) as llm:
        assert greedy_tokens(llm, PROMPTS) == alone
        assert llm.engine.stats().num_preemptions > 0


@pytest.mark.parametrize("variant", ["qwen3_tied", "gemma2", "gpt_oss"])  # soft caps, sinks
def test_a_known_architecture_gives_the_same_tokens_either_way(
    variant: str, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(tmp_path, variant)
    with open_llm(checkpoint) as llm:
        own = greedy_tokens(llm, PROMPTS)
    with open_llm(checkpoint, model_impl="transformers") as llm:
        assert isinstance(model_of(llm), TransformersLM)
        assert greedy_tokens(llm, PROMPTS) == own


def test_weights_are_quantized_as_in_other_models(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "qwen3")
    with open_llm(checkpoint, quantization="int8") as llm:
        own = greedy_tokens(llm, PROMPTS)
    with open_llm(checkpoint, quantization="int8", model_impl="transformers") as llm:
        assert greedy_tokens(llm, PROMPTS) == own


def test_random_weights_are_made_for_all_of_them() -> None:
    with torch.inference_mode():
        model = build_model(config_of("StableLm"), tiny_build())
        fill_dummy(model, seed=0)
        model.check()
        hidden = model.embed(torch.tensor([1, 2, 3]))
    assert hidden.isfinite().all()
    norms = {name: value for name, value in model.named_parameters() if "norm" in name}
    assert norms
    assert all((value == (0.0 if "bias" in name else 1.0)).all() for name, value in norms.items())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (config_of("Bloom"), "computes attention in a way of its own, not through the interface"),
        (
            config_of("Lfm2", layer_types=["conv", "full_attention"]),
            "it has layers of kind conv",
        ),
        (
            config_of(
                "DeepseekV3", kv_lora_rank=16, q_lora_rank=None, qk_rope_head_dim=8,
                qk_nope_head_dim=8, v_head_dim=12, first_k_dense_replace=2,
                num_key_value_heads=4,
            ),
            "has values of 12 and keys of 16 dimensions per head",
        ),
        (
            config_of("StableLm", rope_parameters={
                "rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4,
                "partial_rotary_factor": 1.0,
            }),
            r"frequencies \(rope_type dynamic\) that change with the longest request",
        ),
        (
            {**config_of("StableLm"), "max_position_embeddings": "x"},
            r"^config.json: transformers cannot make StableLmForCausalLM of it: [^\n]+$",
        ),
    ],
    ids=["no interface", "convolutions", "two sizes", "dynamic", "several lines"],
)  # fmt: skip
def test_what_cannot_run_that_way_is_refused_with_the_reason(
    config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        build_model(config, tiny_build(), "transformers")


def test_masks_are_read_from_the_functions_that_describe_them() -> None:
    full = masking_utils.causal_mask_function
    windowed = masking_utils.sliding_window_causal_mask_function(5)
    assert describe_mask(mask_function=full) == CausalMask(None)
    assert describe_mask(mask_function=windowed) == CausalMask(5)
    chunked = masking_utils.chunked_causal_mask_function(16, torch.zeros(1, dtype=torch.long))
    for other in (chunked, masking_utils.bidirectional_mask_function):
        with pytest.raises(Unsupported, match="neither causal nor a sliding window"):
            describe_mask(mask_function=other)


@torch.inference_mode()
def test_tokens_that_reach_each_other_past_attention_are_refused() -> None:
    model = build_model(config_of("StableLm"), tiny_build())
    fill_dummy(model, seed=0)
    model.check()
    mlp = model.get_submodule("model.layers.1.mlp")
    mlp.register_forward_hook(lambda _module, _inputs, output: output.roll(1, dims=1) + 1.0)
    norm = model.get_submodule("model.norm")
    norm.register_forward_hook(lambda _module, _inputs, output: output + output.cumsum(dim=1))
    with pytest.raises(ModelError, match="on other ways than attention"):
        model.check()


def test_several_ranks_are_refused() -> None:
    build = tiny_build(mesh=Mesh(RankGroup(rank=0, size=2)))
    with pytest.raises(ConfigError, match="tensor_parallel_size must be 1 for StableLmForCausalLM"):
        build_model(config_of("StableLm"), build)


def test_learned_positions_bound_the_context() -> None:
    config = config_of("GPT2", n_positions=48)
    with pytest.raises(ConfigError, match="max_model_len must be at most 48 for GPT2LMHeadModel"):
        build_model({**config, "architectures": ["GPT2LMHeadModel"]}, tiny_build())


def test_without_a_length_asked_for_it_is_that_of_learned_positions(tmp_path: Path) -> None:
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=48, initializer_range=0.3
    )
    torch.manual_seed(1)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with open_llm(tmp_path) as llm:
        assert llm.engine.limits.max_model_len == 48
        (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
    assert Reference(tmp_path).count_near_ties([5, 6, 7], output.outputs[0].token_ids) == 0


def test_who_asks_for_own_code_alone_is_told_of_the_other() -> None:
    config = config_of("StableLm")
    with pytest.raises(ModelError, match="transformers knows it: use --model-impl auto"):
        build_model(config, tiny_build(), "penstock")
    with pytest.raises(ModelError, match="transformers does not know it either"):
        build_model({**config, "architectures": ["RiverForCausalLM"]}, tiny_build())
    with pytest.raises(ModelError, match="needs a class for causal language models"):
        build_model({**config, "architectures": ["BertModel"]}, tiny_build(), "transformers")


def test_without_transformers_the_errors_say_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "has_transformers", lambda: False)
    for model_impl in ("auto", "penstock", "transformers"):
        with pytest.raises(ModelError, match=r"pip install 'penstock\[transformers\]'"):
            build_model(config_of("StableLm"), tiny_build(), model_impl)
