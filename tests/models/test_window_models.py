"""Gemma 2, Gemma 3, GPT-OSS and Llama 4: what their files may say, and experts that come packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_engine import greedy_tokens, open_llm, random_prompts
from tiny_models import config_of, make_checkpoint

from penstock.layers.build import Build
from penstock.layers.norm import ZeroCentredNorm
from penstock.loading.text_config import text_settings
from penstock.models.config import DecoderConfig
from penstock.models.gemma2 import Gemma2ForCausalLM, layer_is_windowed
from penstock.models.gemma3 import Gemma3ForCausalLM
from penstock.models.gpt_oss import unpack_mxfp4
from penstock.models.llama4 import (
    Llama4ForCausalLM,
    chunk_of_layer,
    layer_has_experts,
    layer_has_positions,
)
from penstock.models.registry import build_model
from penstock.models.runtime import longest_context
from penstock.ops.registry import Ops
from penstock.protocol.errors import ModelError
from penstock.protocol.kv import ChunkedLocalSpec, SlidingWindowSpec


def build_of(max_model_len: int = 64, dtype: torch.dtype = torch.float32) -> Build:
    return Build(dtype, torch.device("cpu"), max_model_len, Ops("cpu"))


def tokens(folder: Path) -> list[list[int]]:
    with open_llm(folder, max_model_len=64) as llm:
        return greedy_tokens(llm, random_prompts(0, 3), 12)


def random_mxfp4(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks [..., 16] and scales [...], numbers of about 1."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(123, 126, shape, generator=generator, dtype=torch.uint8)
    return blocks, scales


def test_unpacked_numbers_are_those_of_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = random_mxfp4((3, 6, 2), seed=1)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    ours = torch.stack([unpack_mxfp4(*both) for both in zip(blocks, scales, strict=True)])
    assert ours.shape == (3, 6, 64)
    assert torch.equal(ours, theirs.transpose(1, 2))


def pack_experts(folder: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors with packed experts; the file itself gets the numbers they hold."""
    (path,) = folder.glob("*.safetensors")
    plain = load_file(path)
    packed = dict(plain)
    for seed, name in enumerate(sorted(plain)):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, columns, rows = plain[name].shape
        blocks, scales = random_mxfp4((experts, rows, columns // 32), seed)
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        unpacked = [unpack_mxfp4(*both) for both in zip(blocks, scales, strict=True)]
        plain[name] = torch.stack(unpacked).float().transpose(1, 2).contiguous()
    save_file(plain, path, {"format": "pt"})
    return packed


def test_packed_experts_are_unpacked_while_they_load(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "gpt_oss", intermediate_size=96)
    packed = pack_experts(folder)
    expected = tokens(folder)
    (path,) = folder.glob("*.safetensors")
    save_file(packed, path, {"format": "pt"})
    assert tokens(folder) == expected
    del packed["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(packed, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks model.layers.1.mlp.experts.0.down_proj.weight"):
        tokens(folder)


@torch.inference_mode()
def test_a_gemma_norm_rounds_only_its_result() -> None:
    norm = ZeroCentredNorm(build_of(dtype=torch.bfloat16), 64, 1e-6)
    weight = torch.linspace(-0.1, 0.1, 64).bfloat16()
    norm.load("weight", "", weight)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert norm(x).dtype == torch.bfloat16
    x32 = x.float()
    exact = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + weight.float())
    torch.testing.assert_close(norm(x).float(), exact, rtol=2**-7, atol=0)


def test_older_files_of_gemma_3_mean_the_same() -> None:
    config = config_of("gemma3")
    older = {key: value for key, value in config.items() if key != "rope_parameters"}
    older |= {
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }
    newer, model = (build_model(each, build_of()) for each in (config, older))
    assert isinstance(newer, Gemma3ForCausalLM)
    assert isinstance(model, Gemma3ForCausalLM)
    assert torch.equal(newer.rotary.table, model.rotary.table)
    assert torch.equal(newer.local_rotary.table, model.local_rotary.table)
    assert not torch.equal(model.rotary.table, model.local_rotary.table)


def test_settings_of_a_text_model_within_another_are_found_and_filled_in() -> None:
    published = {  # as the 4B model has them
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": {
            "hidden_size": 2560,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152},
    }
    settings = text_settings(published)
    assert settings["eos_token_id"] == [1, 106]
    assert (settings["hidden_size"], settings["vocab_size"]) == (2560, 262_208)
    assert longest_context(settings) == 131_072  # which is stretched already
    rope = Gemma3ForCausalLM.settings(settings)
    assert rope["rope_parameters"] == {"rope_theta": 1e6, "factor": 8.0, "rope_type": "linear"}
    assert rope["local_rope"] == {"rope_theta": 1e4}
    assert text_settings({"model_type": "llama"}) == {"model_type": "llama"}
    with pytest.raises(ModelError, match="text_config must be an object"):
        text_settings({**published, "text_config": [1]})


def test_llama_4s_text_settings_are_found_and_filled_in() -> None:
    published = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "text_config": {
            "max_position_embeddings": 10_485_760,
            "no_rope_layers": [],
            "rope_scaling": {
                "factor": 16.0,
                "high_freq_factor": 1.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
        },
        "vision_config": {"hidden_size": 1408},
    }
    settings = text_settings(published)
    assert longest_context(settings) == 10_485_760
    model = Llama4ForCausalLM.settings(settings)
    assert (model["intermediate_size"], model["moe_intermediate_size"]) == (16384, 8192)
    config = DecoderConfig.from_raw(model)
    assert [layer_has_positions(config, index) for index in range(4)] == [True, True, True, False]
    assert [chunk_of_layer(config, index) for index in range(4)] == [8192, 8192, 8192, None]
    assert all(layer_has_experts(config, index) for index in range(48))


def test_chunks_longer_than_any_request_are_full_attention() -> None:
    config = config_of("llama4")  # with chunks of 18
    kinds = {
        length: build_model(config, build_of(length)).kv_specs("float32") for length in (18, 19)
    }
    chunked = {
        length: [isinstance(spec, ChunkedLocalSpec) for spec in specs.values()]
        for length, specs in kinds.items()
    }
    assert chunked == {18: [False, False, False], 19: [True, False, True]}


def test_without_layer_types_the_last_of_every_few_layers_sees_everything() -> None:
    config = config_of("gemma2")
    del config["layer_types"]
    model = build_model(config, build_of())
    assert isinstance(model, Gemma2ForCausalLM)
    windowed = [layer_is_windowed(model.config, index, period=6) for index in range(7)]
    assert windowed == [True] * 5 + [False, True]


def test_a_pattern_in_letters_counts_for_nothing_beside_layer_types() -> None:
    config = config_of("exaone4_windowed")  # of EXAONE 4's published files, 32B has such a pattern
    assert config["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    model = build_model({**config, "sliding_window_pattern": "LLLG"}, build_of())
    windowed = [isinstance(s, SlidingWindowSpec) for s in model.kv_specs("float32").values()]
    assert windowed == [True, False, True]
    without = {key: value for key, value in config.items() if key != "layer_types"}
    with pytest.raises(ModelError, match="sliding_window_pattern must be an integer"):
        build_model({**without, "sliding_window_pattern": "LLLG"}, build_of())


def test_null_takes_a_soft_cap_away_where_a_missing_one_has_its_default() -> None:
    config = config_of("gemma2")
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    missing = {key: value for key, value in config.items() if key not in names}
    for settings, caps in ((missing, (50.0, 30.0)), (config | dict.fromkeys(names), (None, None))):
        model = build_model(settings, build_of())
        assert isinstance(model, Gemma2ForCausalLM)
        assert (model.attention(0).attention.softcap, model.final_cap) == caps


def test_a_window_that_no_request_outgrows_needs_no_group_of_its_own() -> None:
    config = config_of("gemma2")  # a window of 24
    for max_model_len, num_windowed in ((24, 0), (25, 2)):
        specs = build_model(config, build_of(max_model_len)).kv_specs("float32").values()
        assert sum(isinstance(spec, SlidingWindowSpec) for spec in specs) == num_windowed


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types must name .* each of 3 lay"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be above 0, got 0"),
        ("gemma2", {"attn_logit_softcapping": -1}, "attn_logit_softcapping must be above 0"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_act 'relu' is not supported"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit must be 7.0, got 5.0"),
        ("gpt_oss", {"num_experts_per_tok": 9}, "must be at most num_local_experts"),
    ],
)
def test_settings_that_make_no_sense_are_named(
    variant: str, change: dict[str, Any], message: str
) -> None:
    config = config_of(variant)
    with pytest.raises(ModelError, match=message):
        build_model({**config, **change}, build_of())
