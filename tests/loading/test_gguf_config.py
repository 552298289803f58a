from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_builder import CONTEXT, FFN, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCAB, write_gguf

from penstock.loading.gguf.config import (
    config_from_gguf,
    generation_config_from_gguf,
    map_tensors,
)
from penstock.loading.gguf.file import read_gguf
from penstock.loading.gguf.rope import fit_llama3_scaling
from penstock.protocol.errors import ModelError


def config_of(path: Path, arch: str = "llama", **kwargs: Any) -> dict[str, Any]:
    write_gguf(path / "model.gguf", arch, **kwargs)
    return config_from_gguf(read_gguf(path / "model.gguf"))


def llama3_divisors(
    head_dim: int, theta: float, factor: float, high: float, original: int
) -> np.ndarray:
    """The table that a converter writes, from transformers' own frequencies."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    config = LlamaConfig(
        hidden_size=head_dim * 4, num_attention_heads=4, rope_parameters=parameters
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / (theta ** (torch.arange(0, head_dim, 2).float() / head_dim))
    return np.maximum((plain / scaled).numpy(), 1.0)


@pytest.mark.parametrize(
    ("arch", "hf_class"),
    [
        ("llama", "LlamaForCausalLM"),
        ("qwen2", "Qwen2ForCausalLM"),
        ("qwen3", "Qwen3ForCausalLM"),
    ],
)
def test_the_config_has_hugging_face_keys(tmp_path: Path, arch: str, hf_class: str) -> None:
    config = config_of(tmp_path, arch)
    expected = {
        "architectures": [hf_class],
        "model_type": arch,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "max_position_embeddings": CONTEXT,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 3,
        "torch_dtype": "float32",
    }
    assert expected.items() <= config.items()


def test_an_output_tensor_means_untied_embeddings(tmp_path: Path) -> None:
    assert config_of(tmp_path, tied=False)["tie_word_embeddings"] is False


def test_bias_tensors_mean_attention_bias(tmp_path: Path) -> None:
    biases = {f"blk.{n}.attn_q.bias": np.zeros(HIDDEN, np.float32) for n in range(LAYERS)}
    assert config_of(tmp_path)["attention_bias"] is False
    assert config_of(tmp_path, extra=biases)["attention_bias"] is True


def test_every_end_token_is_in_the_generation_config(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, metadata={"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 3})
    assert generation_config_from_gguf(read_gguf(path)) == {"eos_token_id": [3, 7]}
    write_gguf(path)
    assert generation_config_from_gguf(read_gguf(path)) == {"eos_token_id": 3}
    write_gguf(path, metadata={"tokenizer.ggml.eos_token_id": None})
    assert generation_config_from_gguf(read_gguf(path)) == {}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"llama.rope.scaling.type": "none"}, None),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5},
            {"rope_type": "linear", "factor": 2.5},
        ),
        ({"llama.rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 16.0,
            },
        ),
    ],
    ids=["none", "linear", "linear of 2023", "yarn"],
)
def test_rope_scaling_comes_from_the_metadata(
    tmp_path: Path, metadata: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    assert config_of(tmp_path, metadata=metadata)["rope_scaling"] == expected


def test_yarn_attention_factor_includes_yarns_own(tmp_path: Path) -> None:
    metadata = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
        "llama.rope.scaling.attn_factor": 1.0,
    }
    scaling = config_of(tmp_path, metadata=metadata)["rope_scaling"]
    assert scaling["attention_factor"] == pytest.approx(0.1 * np.log(4.0) + 1.0)


@pytest.mark.parametrize(
    ("head_dim", "theta", "factor", "high", "original"),
    [
        (128, 5e5, 8.0, 4.0, 8192),  # Llama 3.1
        (64, 5e5, 32.0, 4.0, 8192),  # Llama 3.2
        (16, 1e4, 8.0, 4.0, 8192),  # too few frequencies to measure a slope
        (128, 1e6, 4.0, 3.0, 4096),  # like nobody's
    ],
)
def test_a_table_of_rope_divisors_becomes_llama3_scaling(
    head_dim: int, theta: float, factor: float, high: float, original: int
) -> None:
    table = llama3_divisors(head_dim, theta, factor, high, original)
    assert fit_llama3_scaling(table, theta) == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def test_a_table_with_one_step_is_llama_4s() -> None:
    """Scout's own settings: waves longer than the 8192 tokens it was trained on are stretched."""
    theta, half = 5e5, 64
    wavelengths = 2 * np.pi * theta ** (np.arange(half) / half)
    table = np.where(wavelengths > 8192, 16.0, 1.0).astype(np.float32)
    assert fit_llama3_scaling(table, theta) == {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    }
    assert fit_llama3_scaling(table[::-1], theta) is None


def test_rope_freqs_in_a_file_set_the_scaling_and_are_no_parameter(tmp_path: Path) -> None:
    table = llama3_divisors(HEAD_DIM, 5e5, 32.0, 4.0, 8192)
    config = config_of(tmp_path, extra={"rope_freqs.weight": table})
    assert config["rope_scaling"]["rope_type"] == "llama3"
    assert config["rope_scaling"]["factor"] == 32.0
    file = read_gguf(tmp_path / "model.gguf")
    assert len(map_tensors(file, config)) == len(file.tensors) - 1


@pytest.mark.parametrize(
    "table",
    [
        np.linspace(3, 1, HEAD_DIM // 2, dtype=np.float32),
        np.full(HEAD_DIM // 2, np.nan, np.float32),
        np.zeros(HEAD_DIM // 2, np.float32),
        np.ones(HEAD_DIM // 2, np.float32),
        np.ones(3, np.float32),
    ],
    ids=["no plateau", "nan", "zero", "no scaling", "wrong length"],
)
def test_a_table_that_is_not_llama3s_is_refused(tmp_path: Path, table: np.ndarray) -> None:
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        config_of(tmp_path, extra={"rope_freqs.weight": table})


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ({"general.architecture": "mamba"}, "'mamba' is not supported; supported: llama, qwen"),
        ({"llama.block_count": None}, r"llama\.block_count must be .* got nothing"),
        ({"llama.block_count": 0}, r"llama\.block_count must be .* got 0"),
        ({"llama.block_count": 2**31 - 1}, "tensors of 2"),
        ({"llama.embedding_length": "many"}, r"llama\.embedding_length .* got 'many'"),
        ({"llama.embedding_length": 512}, r"'token_embd\.weight' has the shape"),
        ({"llama.feed_forward_length": 999}, r"'blk\.0\.ffn_gate\.weight' has the shape"),
        ({"llama.attention.head_count": [4, 2]}, r"head_count must be a positive integer"),
        ({"llama.attention.head_count_kv": 3}, r"'blk\.0\.attn_k\.weight' has the shape"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "positive number"),
        ({"llama.attention.value_length": 32}, "two sizes"),
        ({"llama.rope.dimension_count": 16}, "partly rotated"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ({"llama.expert_count": 8}, r"llama\.expert_used_count must be .* got nothing"),
        (
            {"llama.expert_count": 8, "llama.expert_used_count": 2},
            r"no layer has a tensor 'ffn_down_exps\.weight'",
        ),
        ({"tokenizer.ggml.eos_token_id": "x"}, "eos_token_id must be a token id"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_the_file_and_the_value(
    tmp_path: Path, metadata: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ModelError, match=complaint) as raised:
        config_of(tmp_path, metadata=metadata)
    assert "model.gguf" in str(raised.value)


def test_one_number_a_layer_is_read_when_all_are_alike(tmp_path: Path) -> None:
    metadata = {"llama.attention.head_count": [HEADS] * LAYERS}
    assert config_of(tmp_path, metadata=metadata)["num_attention_heads"] == HEADS


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_tensor_names_are_those_of_transformers(tmp_path: Path, arch: str, tied: bool) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = config_of(tmp_path, arch, tied=tied)
    file = read_gguf(tmp_path / "model.gguf")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if tied:
        del expected["lm_head.weight"]
    mapped = map_tensors(file, config)
    assert {item.name: item.tensor.shape for item in mapped} == expected


def test_only_llama_has_permuted_rows_and_only_in_q_and_k(tmp_path: Path) -> None:
    for arch in ("llama", "qwen2", "qwen3"):
        config = config_of(tmp_path, arch)
        mapped = map_tensors(read_gguf(tmp_path / "model.gguf"), config)
        permuted = {item.name.split(".")[-2] for item in mapped if item.transform}
        assert permuted == ({"q_proj", "k_proj"} if arch == "llama" else set())


def test_unknown_tensors_are_named(tmp_path: Path) -> None:
    extra = {
        "blk.0.mystery.weight": np.zeros(4, np.float32),
        "blk.00.attn_q.weight": np.zeros(4, np.float32),
    }
    config = config_of(tmp_path, extra=extra)
    with pytest.raises(ModelError, match=r"2 tensors .*blk\.0\.mystery\.weight, blk\.00\.attn"):
        map_tensors(read_gguf(tmp_path / "model.gguf"), config)


def test_the_default_models_config_and_names(default_gguf: Path) -> None:
    file = read_gguf(default_gguf)
    config = config_from_gguf(file)
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert expected.items() <= config.items()
    assert generation_config_from_gguf(file) == {"eos_token_id": 2}
    names = {item.name for item in map_tensors(file, config)}
    assert len(names) == 272
    assert {"model.embed_tokens.weight", "model.norm.weight"} < names
    assert "model.layers.29.self_attn.o_proj.weight" in names
