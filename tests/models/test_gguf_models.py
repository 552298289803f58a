"""A GGUF file gives the tokens of the checkpoint it was made from, for every architecture read.

The files are written here as converters write them: names from the gguf package's own tables, the
rows of queries and keys in ggml's order where llama.cpp wants that, experts in one tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_twin_files import write_twin
from gguf_twins import TWINS
from tiny_engine import greedy_tokens, open_llm, random_prompts
from tiny_models import Reference, make_checkpoint

from penstock import SamplingParams
from penstock.layers.gguf import GgufMethod
from penstock.loading.gguf.architectures import ARCHITECTURES
from penstock.loading.gguf.checkpoint import GGUFCheckpoint
from penstock.loading.gguf.config import config_from_gguf
from penstock.loading.gguf.dequant import FLOAT_DTYPES
from penstock.loading.gguf.file import GGUFFile, read_gguf
from penstock.models import assembly
from penstock.models.backend import ModelBackend
from penstock.models.gpt_oss import unpack_mxfp4
from penstock.ops.blocks import BlockTensor
from penstock.ops.gguf_blocks import FORMATS, dequantize
from penstock.ops.registry import Ops
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


HUGE = 2**30


@pytest.mark.parametrize(
    ("twin", "key", "tensor"),
    [
        ("deepseek2_v3", "expert_shared_count", "ffn_gate_shexp"),
        ("deepseek2_v3", "expert_count", "ffn_gate_inp"),
        ("deepseek2_v3", "attention.kv_lora_rank", "attn_kv_a_mqa"),
        ("deepseek2_v3", "attention.q_lora_rank", "attn_q_a"),
        ("deepseek2_v3", "attention.key_length_mla", "attn_q_b"),
        ("deepseek2_v3", "attention.value_length_mla", "attn_output"),
        ("deepseek2_v3", "feed_forward_length", "ffn_gate"),
        ("qwen2moe", "expert_shared_feed_forward_length", "ffn_gate_shexp"),
        ("llama4", "feed_forward_length", "ffn_gate"),
        ("llama4", "expert_feed_forward_length", "ffn_down_exps"),
        ("mamba2", "ssm.state_size", "ssm_conv1d"),
        ("mamba2", "ssm.inner_size", "ssm_conv1d"),
        ("mamba2", "ssm.time_step_rank", "ssm_dt"),
        ("falcon-h1", "ssm.group_count", "ssm_conv1d"),
        ("qwen3next", "ssm.conv_kernel", "ssm_conv1d"),
        ("gemma3", "attention.key_length", "attn_q"),
    ],
)
def test_sizes_that_the_tensors_do_not_have_are_refused_before_a_model_is_built(
    twin: str, key: str, tensor: str, tmp_path: Path
) -> None:
    prefix = TWINS[twin].architecture
    values: dict[str, Any] = {f"{prefix}.{key}": HUGE}
    if key == "attention.key_length":
        values[f"{prefix}.attention.value_length"] = HUGE
    with pytest.raises(ModelError, match=rf"tensor 'blk\.\d\.{tensor}\.\w+' has the shape"):
        config_of(tmp_path, twin, **values)


def test_experts_of_another_size_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'blk\.0\.ffn_down_exps\.weight' has the shape \[6, 64"):
        config_of(tmp_path, "qwen2moe", **{"qwen2moe.expert_feed_forward_length": 48})


def test_scales_of_matrices_and_of_experts_are_multiplied_in(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "folder", "qwen3_moe", mlp_only_layers=[])
    factors = np.arange(1, 9, dtype=np.float32)
    path = write_twin(
        tmp_path / "twin.gguf",
        checkpoint,
        TWINS["qwen3moe"],
        quantize="Q8_0",
        extra={
            "blk.1.attn_q.scale": np.array([0.25], np.float32),
            "blk.1.attn_q.input_scale": np.array([7.0], np.float32),
            "blk.1.ffn_up_exps.scale": factors,
        },
    )
    file = read_gguf(path)
    weights = dict(GGUFCheckpoint(file, config_from_gguf(file), {"Q8_0"}).tensors())

    def floats(name: str) -> np.ndarray:
        tensor = file.tensors[name]
        kind = gguf.GGMLQuantizationType[tensor.type.name]
        rows = file.view(name).reshape(-1, tensor.nbytes // int(np.prod(tensor.shape[:-1])))
        return gguf.quants.dequantize(rows, kind).reshape(tensor.shape)

    queries = weights["model.layers.1.self_attn.q_proj.weight"]
    assert np.array_equal(queries, floats("blk.1.attn_q.weight") * np.float32(0.25))
    ups = floats("blk.1.ffn_up_exps.weight") * factors[:, None, None]
    for expert, own in enumerate(ups):
        name = f"model.layers.1.mlp.experts.{expert}.up_proj.weight"
        assert np.array_equal(weights[name], own)
    assert isinstance(weights["model.layers.1.self_attn.k_proj.weight"], BlockTensor)


def test_scales_that_do_not_fit_the_experts_are_refused(tmp_path: Path) -> None:
    made = TWINS["qwen3moe"]
    checkpoint = make_checkpoint(tmp_path / "folder", made.variant, **made.overrides)
    extra = {"blk.0.ffn_up_exps.scale": np.ones(3, np.float32)}
    file = read_gguf(write_twin(tmp_path / "twin.gguf", checkpoint, made, extra=extra))
    with pytest.raises(ModelError, match=r"ffn_up_exps\.scale has 3 scales of 8 matrices"):
        list(GGUFCheckpoint(file, config_from_gguf(file)).tensors())


def in_blocks(config: Any, platform: Any, dtype: Any, gguf: GGUFFile, raw: Any) -> ModelBackend:
    """Blocks as a GPU keeps them, computed with torch."""
    experts = {tensor.type.name for tensor in gguf.tensors.values() if "_exps." in tensor.name}
    method = GgufMethod(expert_blocks=experts <= FORMATS.keys())
    return ModelBackend(Ops("cpu"), method, torch.float32, native_types=(*FORMATS, *FLOAT_DTYPES))


@pytest.mark.parametrize("twin", TWINS)
def test_blocks_run_as_they_are(twin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every architecture, in each of the ways that layers keep them."""
    variant, overrides = TWINS[twin].variant, TWINS[twin].overrides
    checkpoint = make_checkpoint(tmp_path / "folder", variant, **overrides)
    path = write_twin(tmp_path / "twin.gguf", checkpoint, TWINS[twin], quantize="Q8_0")
    (prompt,) = random_prompts(5, 40)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def logprobs(**options: Any) -> np.ndarray:
        with open_llm(path, max_model_len=64, kv_cache_dtype="float32", **options) as llm:
            (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        found = zip(prompt["prompt_token_ids"][1:], output.prompt_logprobs[1:], strict=True)
        return np.array([each[token].logprob for token, each in found if each is not None])

    floats = logprobs(gguf_compute="dequantize", cpu_backend="torch")
    # Activations are rounded to 8 bits, which does much to some of these random models.
    assert np.corrcoef(logprobs(), floats)[0, 1] > 0.8
    monkeypatch.setattr(assembly, "choose_backend", in_blocks)
    assert np.allclose(logprobs(), floats, atol=1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("quantize", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("twin", TWINS)
def test_blocks_on_a_gpu_give_the_tokens_of_their_floats(
    twin: str, quantize: str, tmp_path: Path
) -> None:
    made = TWINS[twin]
    checkpoint = make_checkpoint(tmp_path / "folder", made.variant, **made.overrides)
    path = write_twin(tmp_path / "twin.gguf", checkpoint, made, quantize=quantize)
    found = []
    for compute in ("auto", "dequantize"):
        options = {"device": "cuda", "dtype": "float32", "gguf_compute": compute}
        with open_llm(path, max_model_len=128, **options) as llm:
            found.append(greedy_tokens(llm, PROMPTS))
    assert found[0] == found[1]


def test_layers_behind_the_last_are_left_out(tmp_path: Path) -> None:
    made = TWINS["glm4moe"]
    checkpoint = make_checkpoint(tmp_path / "folder", made.variant, **made.overrides)
    extra = {
        "blk.3.nextn.eh_proj.weight": np.zeros((64, 128), np.float32),
        "blk.3.attn_q.weight": np.zeros((64, 64), np.float32),
    }
    counts = {"glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1}
    path = write_twin(tmp_path / "twin.gguf", checkpoint, made, counts, extra=extra)
    assert tokens(path) == tokens(checkpoint)


def test_mxfp4_experts_of_a_checkpoint_and_of_its_gguf_file_are_the_same(tmp_path: Path) -> None:
    """A file has a group's numbers in another order: (i, i + 16) in a byte, not (2i, 2i + 1)."""
    checkpoint = make_checkpoint(tmp_path / "folder", "gpt_oss", intermediate_size=96)
    rng = np.random.default_rng(0)
    made = TWINS["gpt-oss"]
    path = write_twin(tmp_path / "twin.gguf", checkpoint, made, quantize="MXFP4")
    file = read_gguf(path)
    name = "blk.1.ffn_gate_exps.weight"
    assert file.tensors[name].type.name == "MXFP4"
    whole = file.view(name).reshape(6, 96, 2, 17)  # [experts, rows, groups, bytes]
    numbers = np.concatenate([whole[..., 1:] & 15, whole[..., 1:] >> 4], axis=-1)
    blocks = numbers[..., 0::2] | (numbers[..., 1::2] << 4)
    scales = np.maximum(whole[..., 0], 104)
    whole[..., 0] = scales
    expert = int(rng.integers(6))
    expected = unpack_mxfp4(torch.from_numpy(blocks[expert]), torch.from_numpy(scales[expert]))
    weights = dict(GGUFCheckpoint(file, config_from_gguf(file), {"Q5_0"}).tensors())
    own = weights[f"model.layers.1.mlp.experts.{expert}.gate_proj.weight"]
    assert isinstance(own, BlockTensor)
    assert own.type_name == "Q5_0"
    assert torch.equal(dequantize(own), expected.float())
