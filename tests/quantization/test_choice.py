"""Which scheme each layer gets, from the configuration and from what the checkpoint has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import quantized_checkpoints as made
import torch
from safetensors.torch import load_file, save_file
from test_formats import EXACT, own_logits, reference_logits, relative_error
from tiny_engine import greedy_tokens, open_llm

from penstock import LLM
from penstock.config.quantization import REFUSED
from penstock.layers.quantized.checkpoints import choose_quantization, is_skipped
from penstock.layers.quantized.plan import Quantization
from penstock.loading.text_config import text_settings
from penstock.protocol.errors import ConfigError, ModelError

Q_PROJ = "model.layers.0.self_attn.q_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
FLOAT8 = {"num_bits": 8, "type": "float", "dynamic": True}


def read(config: dict[str, Any], option: str | None = None) -> Quantization:
    found = choose_quantization({"quantization_config": config}, option)
    assert found is not None
    return found


def label(quantization: Quantization, name: str) -> str | None:
    scheme = quantization.scheme(name, "linear")
    return scheme.label if scheme else None


def group(targets: list[str], bits: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 64}
    return {"targets": targets, "weights": weights, "format": "pack-quantized"}


def test_a_model_without_quantization_config_is_not_quantized() -> None:
    assert choose_quantization({}, None) is None
    assert choose_quantization({"quantization_config": None}, None) is None


def test_names_count_more_than_patterns_and_patterns_more_than_classes() -> None:
    found = read(
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "all": group(["Linear"], 4),
                "some": group([r"re:.*self_attn.*"], 8),
                "one": group(["model.layers.1.self_attn.q_proj"], 4),
            },
            "ignore": ["lm_head", r"re:.*mlp\.gate$"],
        }
    )
    assert label(found, "model.layers.0.mlp.up_proj") == "compressed-tensors 4 bits by 64"
    assert label(found, Q_PROJ) == "compressed-tensors 8 bits by 64"
    assert label(found, "model.layers.1.self_attn.q_proj") == "compressed-tensors 4 bits by 64"
    assert label(found, "model.layers.0.mlp.gate") is None
    assert label(found, "lm_head") is None


def test_gptq_takes_other_bits_for_layers_that_match_and_leaves_others_out() -> None:
    dynamic = {r"-:.*o_proj": {}, r"+:.*\.0\..*": {"bits": 8, "group_size": 32}}
    found = read({**GPTQ, "dynamic": dynamic})
    assert label(found, Q_PROJ) == "GPTQ 8 bits by 32"
    assert label(found, "model.layers.1.self_attn.q_proj") == "GPTQ 4 bits by 128"
    assert label(found, "model.layers.0.self_attn.o_proj") is None


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("mlp.gate", "model.layers.0.mlp.gate", True),
        ("mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("model.layers.*.self_attn*", "model.layers.3.self_attn.q_proj", True),
        ("re:.*down_proj", "model.layers.3.mlp.down_proj", True),
    ],
)
def test_modules_that_are_left_out_are_whole_steps_of_a_path(
    pattern: str, name: str, expected: bool
) -> None:
    assert is_skipped(name, [pattern]) is expected


@pytest.mark.parametrize("method", REFUSED)
def test_methods_that_are_gone_are_refused_with_what_to_use_instead(method: str) -> None:
    with pytest.raises(ModelError, match=method) as refused:
        read({"quant_method": method})
    assert REFUSED[method] in str(refused.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "mystery"}, "'mystery' is not known; supported: fp8"),
        ({**GPTQ, "bits": 3}, "bits must be 4 or 8, got 3"),
        ("gptq", "quantization_config must be an object, got 'gptq'"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": "lm_head"},
            "ignore must be a list of names, got 'lm_head'",
        ),
        ({"quant_method": ["gptq"]}, r"\['gptq'\] is not known"),
        ({"bits": 4}, "None is not known"),
        (
            {"load_in_4bit": True, "bnb_4bit_quant_type": "int4"},
            "bnb_4bit_quant_type must be nf4 or fp4, got 'int4'",
        ),
        ({"quant_method": "bitsandbytes"}, "must have load_in_4bit or load_in_8bit"),
        ({**GPTQ, "group_size": 0}, "group_size must be -1 or at least 1, got 0"),
        ({**GPTQ, "group_size": "128"}, "group_size must be -1 or at least 1, got '128'"),
        ({**GPTQ, "dynamic": [1]}, r"quantization_config's dynamic must be an object, got \[1\]"),
        ({**GPTQ, "dynamic": {"+:.*mlp": 3}}, r"dynamic's \+:\.\*mlp must be an object, got 3"),
        ({"config_groups": 7}, "quantization_config's config_groups must be an object, got 7"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size 128 is not support"),
        ({"quant_method": "awq", "modules_to_not_convert": [3]}, "must be a list of names"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": 1}},
            "a of config_groups must be an object, got 1",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": 4}}},
            "weights of a in config_groups must be an object, got 4",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"type": "int"}, "input_activations": FLOAT8}},
            },
            "8-bit int weights and 8-bit float activations: both must be of one kind",
        ),
        ({**GPTQ, "desc_act": "false"}, "desc_act must be true or false, got 'false'"),
        ({"quant_method": "fp8", "ignored_layers": "lm_head"}, "ignored_layers must be a list"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version must be gemm"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"\[64, 64\] is not supported"),
        (
            {
                "quant_method": "compressed-tensors",
                "sparsity_config": {"format": "sparse-24-bitmask"},
            },
            "without 2:4 sparsity",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": group(["Linear"], 3)}},
            "3-bit int weights by group",
        ),
    ],
)
def test_what_a_format_cannot_be_is_said(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(config)


def test_an_option_must_agree_with_the_checkpoint() -> None:
    assert read(GPTQ, "gptq_marlin").scheme(Q_PROJ, "linear") is not None
    with pytest.raises(ConfigError, match="quantization=fp8, but the checkpoint is quantized with"):
        read(GPTQ, "fp8")
    with pytest.raises(ConfigError, match="quantization=awq is for checkpoints"):
        choose_quantization({}, "awq")


@pytest.mark.parametrize(
    ("name", "message"),
    [("hqq", "quantization=hqq is not supported: take"), ("int3", "must be one of fp8")],
)
def test_options_are_checked_before_anything_is_loaded(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("nowhere", quantization=name)


# -- whole checkpoints


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.make_floats(tmp_path_factory.mktemp("floats"), num_hidden_layers=1)


def test_a_layer_that_is_stored_as_floats_is_computed_as_floats(
    floats: Path, tmp_path: Path
) -> None:
    """GPTQ's configuration does not say which layers were left out."""
    quantized, restored = made.quantize(
        floats, tmp_path, *made.gptq(), lambda layer: layer.endswith(("up_proj", "gate_proj"))
    )
    own = own_logits(quantized, cpu_backend="torch")
    assert relative_error(own, reference_logits(restored)) < EXACT


def test_parts_of_a_fused_layer_that_disagree_are_named(floats: Path, tmp_path: Path) -> None:
    quantized, _ = made.quantize(
        floats, tmp_path, *made.gptq(), lambda layer: "proj" in layer and "k_proj" not in layer
    )
    with pytest.raises(ModelError, match=r"self_attn.qkv_proj.*k_proj: not quantized"):
        own_logits(quantized)


def test_a_quantized_output_projection_beside_a_plain_embedding(
    floats: Path, tmp_path: Path
) -> None:
    config, writer = made.gptq(symmetric=False)
    quantized, restored = made.quantize(
        floats, tmp_path, {**config, "lm_head": True}, writer, lambda layer: "embed" not in layer
    )
    expected = reference_logits(restored)
    assert relative_error(own_logits(quantized, cpu_backend="torch"), expected) < EXACT
    assert relative_error(own_logits(quantized), expected) < 0.06


def test_tied_embeddings_stay_floats(tmp_path: Path) -> None:
    folder = made.make_floats(tmp_path / "tied", num_hidden_layers=1, tie_word_embeddings=True)
    quantized, restored = made.quantize(folder, tmp_path, *made.awq())
    own = own_logits(quantized, cpu_backend="torch")
    assert relative_error(own, reference_logits(restored)) < EXACT


def test_numbers_without_scales_are_not_taken_for_floats(floats: Path, tmp_path: Path) -> None:
    quantized, _ = made.quantize(floats, tmp_path, *made.fp8("tensor"))
    path = quantized / "model.safetensors"
    tensors = load_file(path)
    save_file({k: t for k, t in tensors.items() if not k.endswith("scale")}, path)
    with pytest.raises(ModelError, match="stored as float8_e4m3fn, but the checkpoint has no scal"):
        own_logits(quantized)


def test_scales_of_the_cache_are_no_surplus(floats: Path, tmp_path: Path) -> None:
    quantized, restored = made.quantize(floats, tmp_path, *made.awq())
    path = quantized / "model.safetensors"
    scales = {f"model.layers.0.self_attn.{name}_scale": torch.ones(1) for name in ("k", "v")}
    save_file({**load_file(path), **scales}, path)
    own = own_logits(quantized, cpu_backend="torch")
    assert relative_error(own, reference_logits(restored)) < EXACT


def test_a_quantized_head_that_the_configuration_says_is_the_embedding_is_explained(
    floats: Path, tmp_path: Path
) -> None:
    config, write = made.gptq()
    quantized, _ = made.quantize(
        floats, tmp_path, config, write, lambda layer: "embed" not in layer
    )
    path = quantized / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    with pytest.raises(ModelError, match=r"lm_head\.qweight.* set tie_word_embeddings to false"):
        own_logits(quantized)


def test_a_group_that_does_not_fit_is_named(floats: Path, tmp_path: Path) -> None:
    quantized, _ = made.quantize(floats, tmp_path, *made.gptq())
    raw = json.loads((quantized / "config.json").read_text())
    raw["quantization_config"]["group_size"] = 48
    (quantized / "config.json").write_text(json.dumps(raw))
    with pytest.raises(
        ModelError, match=r"model\.layers\.0\.\S+: .* cannot have 4-bit weights in groups of 48"
    ):
        own_logits(quantized)


@pytest.mark.parametrize(
    ("file", "written", "wrap"),
    [
        ("quantize_config.json", made.gptq(), False),
        ("quant_config.json", made.awq(), False),
        ("hf_quant_config.json", made.modelopt_nvfp4(), True),
    ],
)
def test_older_tools_say_it_in_a_file_of_its_own(
    file: str, written: Any, wrap: bool, floats: Path, tmp_path: Path
) -> None:
    quantized, restored = made.quantize(floats, tmp_path, *written)
    raw = json.loads((quantized / "config.json").read_text())
    said = raw.pop("quantization_config")
    del said["quant_method"]
    (quantized / "config.json").write_text(json.dumps(raw))
    (quantized / file).write_text(json.dumps({"quantization": said} if wrap else said))
    own = own_logits(quantized, cpu_backend="torch")
    assert relative_error(own, reference_logits(restored)) < EXACT


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_a_model_of_images_too_says_it_beside_its_text_model(key: str) -> None:
    config = {"model_type": "gemma3", "text_config": {"hidden_size": 64}, key: GPTQ}
    found = choose_quantization(text_settings(config), None)
    assert found is not None
    assert label(found, Q_PROJ) == "GPTQ 4 bits by 128"


def test_fused_tensors_of_a_checkpoint_are_taken_apart(tmp_path: Path) -> None:
    """Phi-3 has query, key and value in one tensor, and its scales likewise."""
    folder = made.make_floats(
        tmp_path / "phi3", "phi3", num_hidden_layers=1, sliding_window=None, head_dim=32
    )
    for index, (config, writer) in enumerate(
        [made.gptq(symmetric=False), made.fp8("tensor"), made.awq()]
    ):
        quantized, restored = made.quantize(folder, tmp_path / str(index), config, writer)
        own = own_logits(quantized, cpu_backend="torch")
        rounded = config["quant_method"] == "fp8"
        assert relative_error(own, reference_logits(restored)) < (0.1 if rounded else EXACT)


@pytest.mark.parametrize("written", [made.awq(), made.fp8("tensor")], ids=["awq", "fp8"])
def test_models_that_transformers_runs_have_quantized_weights_too(
    written: Any, floats: Path, tmp_path: Path
) -> None:
    quantized, _ = made.quantize(floats, tmp_path, *written)
    prompt = {"prompt_token_ids": [5, 17, 60, 9]}
    tokens = []
    for model_impl in ("penstock", "transformers"):
        with open_llm(quantized, max_model_len=64, model_impl=model_impl) as llm:
            tokens.append(greedy_tokens(llm, [prompt], 12))
    assert tokens[0] == tokens[1]


def test_scales_may_have_the_names_of_transformers(floats: Path, tmp_path: Path) -> None:
    quantized, restored = made.quantize(floats, tmp_path, *made.fp8("tensor", static=True))
    path = quantized / "model.safetensors"
    names = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}

    def renamed(name: str) -> str:
        layer, _, parameter = name.rpartition(".")
        return f"{layer}.{names.get(parameter, parameter)}"

    save_file({renamed(name): tensor for name, tensor in load_file(path).items()}, path)
    assert relative_error(own_logits(quantized), reference_logits(restored)) < 1e-3
