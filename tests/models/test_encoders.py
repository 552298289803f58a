"""Encoders against transformers: states of every token, labels, and what checkpoints may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_encoders import DECODERS, ENCODERS, make_encoder
from tiny_engine import open_llm, random_prompts

from penstock import LLM, PoolingParams
from penstock.models.architectures import ENCODERS as KNOWN
from penstock.protocol.errors import ConfigError, ModelError

LENGTHS = (1, 2, 5, 17, 31, 33, 64, 100)
TOLERANCE = 1e-4
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "block_size": 16}


# Without the padding token, at which transformers' RoBERTa does not count positions.
PROMPTS = [
    {"prompt_token_ids": [max(token, 8) for token in prompt["prompt_token_ids"]]}
    for prompt in random_prompts(0, *LENGTHS)
]


@torch.inference_mode()
def reference(model: Any, attribute: str) -> list[torch.Tensor]:
    """What transformers' model gives for each prompt, computed alone."""
    prompts = [torch.tensor([p["prompt_token_ids"]]) for p in PROMPTS]
    return [getattr(model(prompt), attribute)[0] for prompt in prompts]


def encode(llm: LLM, prompts: list[Any], **params: Any) -> list[Any]:
    outputs = llm.encode(prompts, PoolingParams(use_activation=False, **params), use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.outputs.data for output in outputs]


def assert_close(found: list[Any], expected: list[torch.Tensor]) -> None:
    for own, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, theirs.numpy(), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("variant", ENCODERS | DECODERS)
def test_states_are_those_of_transformers_alone_and_batched(
    tmp_path: Path, variant: str, backend: str
) -> None:
    expected = reference(make_encoder(tmp_path, variant), "last_hidden_state")
    prompts = PROMPTS
    with open_llm(tmp_path, cpu_backend=backend, **OPTIONS) as llm:
        batched = encode(llm, prompts, task="token_embed")
        assert_close(batched, expected)
        for prompt, together in zip(prompts, batched, strict=True):
            (alone,) = encode(llm, [prompt], task="token_embed")
            if backend == "auto" and variant in ENCODERS:  # all of it is in the library
                np.testing.assert_array_equal(alone, together)
            else:
                np.testing.assert_allclose(alone, together, atol=TOLERANCE)


@pytest.mark.parametrize("variant", ENCODERS)
def test_labels_of_prompts_are_those_of_transformers(tmp_path: Path, variant: str) -> None:
    expected = reference(make_encoder(tmp_path, variant, "ForSequenceClassification"), "logits")
    with open_llm(tmp_path, **OPTIONS) as llm:
        assert_close(encode(llm, PROMPTS), expected)


@pytest.mark.parametrize("variant", ENCODERS)
def test_labels_of_tokens_are_those_of_transformers(tmp_path: Path, variant: str) -> None:
    expected = reference(make_encoder(tmp_path, variant, "ForTokenClassification"), "logits")
    with open_llm(tmp_path, **OPTIONS) as llm:
        assert_close(encode(llm, PROMPTS), expected)


@pytest.mark.parametrize("variant", ["bert", "roberta", "distilbert", "modernbert"])
def test_the_head_of_a_masked_language_model_is_left_out(tmp_path: Path, variant: str) -> None:
    model = make_encoder(tmp_path, variant, "ForMaskedLM")
    expected = reference(model.base_model, "last_hidden_state")
    with open_llm(tmp_path, **OPTIONS) as llm:
        assert_close(encode(llm, PROMPTS, task="token_embed"), expected)


def test_nomic_berts_own_names_of_settings_are_read(tmp_path: Path) -> None:
    expected = reference(make_encoder(tmp_path, "nomic_bert"), "last_hidden_state")
    config = {
        "architectures": ["NomicBertModel"],
        "model_type": "nomic_bert",
        "vocab_size": 256,
        "type_vocab_size": 2,
        "n_embd": 64,
        "n_inner": 112,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 128,
        "layer_norm_epsilon": 1e-12,
        "rotary_emb_base": 500,
        "rotary_emb_fraction": 1.0,
        "activation_function": "swiglu",
        "prenorm": False,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with open_llm(tmp_path, **OPTIONS) as llm:
        assert_close(encode(llm, PROMPTS, task="token_embed"), expected)
    path.write_text(json.dumps({**config, "prenorm": True}))
    with pytest.raises(ModelError, match="prenorm must be False, got True"):
        open_llm(tmp_path, **OPTIONS)


@pytest.mark.parametrize("variant", ["bert", "nomic_bert", "modernbert"])
def test_int8_weights_change_vectors_little(tmp_path: Path, variant: str) -> None:
    make_encoder(tmp_path, variant)
    prompts = PROMPTS
    vectors = []
    for quantization in (None, "int8"):
        with open_llm(tmp_path, quantization=quantization, **OPTIONS) as llm:
            outputs = llm.embed(prompts, use_tqdm=False)
            vectors.append(np.stack([output.outputs.embedding for output in outputs]))
    exact, rounded = vectors
    assert not np.array_equal(exact, rounded)
    assert (exact * rounded).sum(1).min() > 0.95


def test_each_architecture_names_a_checkpoint_that_is_tested() -> None:
    for name, known in KNOWN.items():
        for variant in known.parity:
            assert variant in ENCODERS | DECODERS, name


def test_an_encoder_that_is_to_generate_is_refused(tmp_path: Path) -> None:
    make_encoder(tmp_path, "bert")
    with pytest.raises(ConfigError, match="encoder, which has no next token"):
        open_llm(tmp_path, runner="generate", **OPTIONS)


@pytest.mark.parametrize(
    ("variant", "setting", "message"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"hidden_act": "tanhshrink"}, "hidden_act 'tanhshrink' is not supported"),
        ("bert", {"num_attention_heads": 5}, "must be a multiple of num_attention_heads"),
        ("modernbert", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gte", {"layer_norm_type": "rms_norm"}, "layer_norm_type"),
    ],
)
def test_settings_that_are_not_supported_are_named(
    tmp_path: Path, variant: str, setting: dict[str, Any], message: str
) -> None:
    make_encoder(tmp_path, variant)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **setting}))
    with pytest.raises(ModelError, match=message):
        open_llm(tmp_path, **OPTIONS)
