"""Models with latent attention, and experts chosen as DeepSeek does: what chunks, cached prefixes,
preemption, backends, ranks and the cache's type must not change. Their parity with transformers,
alone and batched, is in test_parity."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tiny_engine import assert_ranks_agree, greedy_tokens, open_llm, random_prompts
from tiny_models import config_of, make_checkpoint

from penstock import LLM
from penstock.distributed.mesh import Mesh, RankGroup
from penstock.executor.in_process import InProcessExecutor
from penstock.layers.build import Build
from penstock.layers.experts import Router
from penstock.layers.latent_attention import LatentAttention
from penstock.models.decoder import DecoderLM
from penstock.models.registry import build_model
from penstock.ops.registry import Ops
from penstock.protocol.errors import ConfigError, ModelError
from penstock.protocol.kv import LatentSpec

SLOW = pytest.mark.slow
VARIANTS = (
    "deepseek_v2", pytest.param("deepseek_v2_lite", marks=SLOW), "deepseek_v3", "glm4_moe",
    pytest.param("glm4_moe_lite", marks=SLOW), "minimax_m2",
)  # fmt: skip
PROMPTS = random_prompts(6, 3, 17, 40, 70)  # no choice of experts in them is a near tie


def model_of(llm: LLM) -> DecoderLM:
    executor = llm.engine.executor
    assert isinstance(executor, InProcessExecutor)
    return executor.worker.model


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_engine_around_them_changes_nothing(variant: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, variant)
    with open_llm(checkpoint, cpu_backend="torch", max_num_batched_tokens=7) as llm:
        chunked = greedy_tokens(llm, PROMPTS)
        assert greedy_tokens(llm, PROMPTS) == chunked  # from the prefix cache
        assert llm.engine.stats().num_prefix_hits > 0
    tight = {"max_model_len": 128, "num_gpu_blocks_override": 12, "async_scheduling": True}
    with open_llm(checkpoint, **tight) as llm:
        assert greedy_tokens(llm, PROMPTS) == chunked
        assert llm.engine.stats().num_preemptions > 0


@pytest.mark.parametrize("variant", ["deepseek_v2", pytest.param("deepseek_v2_lite", marks=SLOW)])
def test_two_ranks_give_one_ranks_tokens(variant: str, tmp_path: Path) -> None:
    assert_ranks_agree(make_checkpoint(tmp_path, variant), PROMPTS)


def test_the_cache_holds_one_short_vector_a_token(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "deepseek_v3")
    with open_llm(checkpoint) as llm:
        specs = model_of(llm).kv_specs("bfloat16")
        exact = greedy_tokens(llm, PROMPTS)
    assert set(specs.values()) == {LatentSpec(entry_size=32 + 8, dtype="bfloat16")}
    assert len(specs) == 3
    assert specs["model.layers.0"].bytes_per_token() == 80
    with open_llm(checkpoint, kv_cache_dtype="int8") as llm:
        rounded = greedy_tokens(llm, PROMPTS)
    agreeing = [own[0] == theirs[0] for own, theirs in zip(rounded, exact, strict=True)]
    assert sum(agreeing) >= 2, "8 bits are near enough for most"


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_no_second_copy_of_a_matrix_is_kept(backend: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "deepseek_v2")
    stored = safetensors.torch.load_file(checkpoint / "model.safetensors")
    name = "model.layers.1.self_attn.kv_b_proj"
    with open_llm(checkpoint, cpu_backend=backend) as llm:
        model = model_of(llm)
        attention = model.model.layers[1].self_attn
        assert isinstance(attention, LatentAttention)
        kept = [*attention.kv_b_proj.named_parameters(), *attention.kv_b_proj.named_buffers()]
        assert [key for key, _ in kept] == ["weight"]
        assert torch.equal(attention.kv_b_proj.weight, stored[f"{name}.weight"])


@pytest.mark.parametrize("variant", ["deepseek_v3", pytest.param("glm4_moe", marks=SLOW)])
def test_multi_token_prediction_layers_are_left_out(variant: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, variant)
    with open_llm(checkpoint) as llm:
        expected = greedy_tokens(llm, PROMPTS)
    path = checkpoint / "model.safetensors"
    stored = safetensors.torch.load_file(path)
    last = {name: tensor for name, tensor in stored.items() if "layers.2." in name}
    extra = {name.replace("layers.2.", "layers.3."): own.clone() for name, own in last.items()}
    extra["model.layers.3.eh_proj.weight"] = torch.randn(64, 128)
    safetensors.torch.save_file({**extra, **stored}, path, metadata={"format": "pt"})
    with open_llm(checkpoint) as llm:
        assert greedy_tokens(llm, PROMPTS) == expected
    surplus = {**stored, "model.layers.2.eh_proj.weight": torch.randn(64, 128)}
    safetensors.torch.save_file(surplus, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"unexpected tensors: model.layers.2.eh_proj.weight"):
        open_llm(checkpoint)


def test_scores_of_experts_are_float32_in_a_model_of_16_bits() -> None:
    build = Build(torch.bfloat16, torch.device("cpu"), 64, Ops("cpu"))
    model = build_model(config_of("deepseek_v3"), build)
    routers = [m for m in model.modules() if isinstance(m, Router)]
    assert len(routers) == 2
    with torch.inference_mode():
        for router in routers:
            torch.nn.init.normal_(router.weight)
            x = torch.randn(3, 64, dtype=torch.bfloat16)
            expected = x.double() @ router.weight.double().t()
            torch.testing.assert_close(router(x).double(), expected, rtol=1e-5, atol=1e-5)


def test_dummy_weights_need_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("deepseek_v3")))
    with open_llm(tmp_path, load_format="dummy") as llm:
        assert all(len(own) == 16 for own in greedy_tokens(llm, PROMPTS))


def test_ranks_that_do_not_divide_the_heads_are_refused() -> None:
    mesh = Mesh(RankGroup(rank=0, size=3))
    build = Build(torch.float32, torch.device("cpu"), 64, Ops("cpu"), mesh=mesh)
    with pytest.raises(ConfigError, match="must divide the model's 4 attention heads"):
        build_model(config_of("deepseek_v2"), build)


@pytest.mark.parametrize("backend", [pytest.param("torch", marks=SLOW), "auto"])
def test_of_an_fp8_checkpoint_the_matrix_is_unpacked(backend: str, tmp_path: Path) -> None:
    """As DeepSeek V3 is published: blocks of 128 by 128, each with a scale."""
    checkpoint = make_checkpoint(tmp_path, "deepseek_v3")
    path, stored = checkpoint / "model.safetensors", {}
    floats: dict[str, torch.Tensor] = {}
    for name, tensor in safetensors.torch.load_file(path).items():
        stored[name] = tensor
        if "_proj" in name and name.endswith(".weight"):
            rows, columns = (-(-size // 128) for size in tensor.shape)
            scale = torch.full((rows, columns), float(tensor.abs().max()) / 448)
            stored[name] = (tensor / scale[0, 0]).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale
            floats[name] = stored[name].float() * scale[0, 0]
    safetensors.torch.save_file(stored, path, metadata={"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }  # fmt: skip
    (checkpoint / "config.json").write_text(json.dumps(config))
    with open_llm(checkpoint, cpu_backend=backend) as llm:
        assert all(len(own) == 16 for own in greedy_tokens(llm, PROMPTS))
        attention = model_of(llm).model.layers[2].self_attn
        assert isinstance(attention, LatentAttention)
        expected = floats["model.layers.2.self_attn.kv_b_proj.weight"]
        weight = attention.kv_b_proj.weight.data
        torch.testing.assert_close(weight, expected, rtol=1e-3, atol=1e-4)  # by way of float16
