"""Jina's own repositories: XLM-RoBERTa under flash-attn's names, rotary, with adapters."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_encoders import make_encoder
from tiny_engine import open_llm, random_prompts

from penstock import PoolingParams
from penstock.protocol.errors import ModelError

PROMPTS = [
    {"prompt_token_ids": [max(token, 8) for token in prompt["prompt_token_ids"]]}
    for prompt in random_prompts(0, 1, 9, 64)
]
TASKS = ["retrieval.query", "retrieval.passage", "text-matching"]
RANK, ALPHA = 2, 3.0
FLASH = {
    r"^roberta\.encoder\.layer\.": "roberta.encoder.layers.",
    r"^roberta\.embeddings\.LayerNorm\.": "roberta.emb_ln.",
    r"\.attention\.output\.LayerNorm\.": ".norm1.",
    r"\.attention\.output\.dense\.": ".mixer.out_proj.",
    r"\.intermediate\.dense\.": ".mlp.fc1.",
    r"\.(\d+)\.output\.LayerNorm\.": r".\1.norm2.",
    r"\.(\d+)\.output\.dense\.": r".\1.mlp.fc2.",
}


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], **settings: Any) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()},
              folder / "model.safetensors")  # fmt: skip
    config = json.loads((folder / "config.json").read_text()) | settings
    del config["model_type"]  # theirs have none
    config["auto_map"] = {"AutoModel": "modeling_xlm_roberta.XLMRobertaModel"}  # never run
    (folder / "config.json").write_text(json.dumps(config))


@torch.inference_mode()
def outputs(model: Any, attribute: str) -> list[Any]:
    prompts = [torch.tensor([prompt["prompt_token_ids"]]) for prompt in PROMPTS]
    return [getattr(model(prompt), attribute)[0].numpy() for prompt in prompts]


def assert_same(folder: Path, expected: list[Any], **options: Any) -> None:
    task = "token_embed" if expected[0].ndim == 2 else "classify"
    params = PoolingParams(task=task, use_activation=False)  # type: ignore[arg-type]
    with open_llm(folder, **options) as llm:
        found = llm.encode(PROMPTS, params, use_tqdm=False)
    for own, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(own.outputs.data, theirs, atol=1e-4, rtol=1e-4)


def test_jinas_reranker_gives_the_scores_of_xlm_roberta(tmp_path: Path) -> None:
    model = make_encoder(tmp_path, "xlm_roberta", "ForSequenceClassification", num_labels=1)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        for pattern, replacement in FLASH.items():
            name = re.sub(pattern, replacement, name)
        tensors[name] = tensor
    for layer in range(4):
        parts = [f"roberta.encoder.layers.{layer}.attention.self.{part}" for part in
                 ("query", "key", "value")]  # fmt: skip
        for kind in ("weight", "bias"):
            joined = torch.cat([tensors.pop(f"{part}.{kind}") for part in parts])
            tensors[f"roberta.encoder.layers.{layer}.mixer.Wqkv.{kind}"] = joined
    assert "roberta.encoder.layers.0.mlp.fc1.weight" in tensors
    assert not any("attention" in name or "LayerNorm" in name for name in tensors)
    rewrite(tmp_path, tensors, position_embedding_type="absolute", use_flash_attn=True)
    assert_same(tmp_path, outputs(model, "logits"))
    with open_llm(tmp_path) as llm:  # positions begin behind the padding token, 3
        assert llm.engine.limits.max_model_len == 128 - 4


@pytest.fixture
def adapted(tmp_path: Path) -> tuple[Path, Any, dict[str, torch.Tensor]]:
    """Jina's checkpoint, transformers' model of its base, and all tensors."""
    model = make_encoder(tmp_path, "jina_v3")
    torch.manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        name = name if name.startswith("roberta.") else f"roberta.{name}"
        layer = name.removesuffix(".weight")
        if tensor.ndim != 2:
            tensors[name] = tensor
            continue
        rows, columns = tensor.shape
        is_embedding = name.endswith("_embeddings.weight")
        a, b = ((rows, RANK), (RANK, columns)) if is_embedding else ((RANK, columns), (rows, RANK))
        tensors |= {
            f"{layer}.parametrizations.weight.original": tensor,
            f"{layer}.parametrizations.weight.0.lora_A": torch.randn(len(TASKS), *a) / 4,
            f"{layer}.parametrizations.weight.0.lora_B": torch.randn(len(TASKS), *b) / 4,
        }
    rewrite(
        tmp_path, tensors, architectures=["XLMRobertaModel"], position_embedding_type="rotary",
        rotary_emb_base=500.0, rope_parameters=None, lora_adaptations=TASKS, lora_rank=RANK,
        lora_alpha=ALPHA,
    )  # fmt: skip
    return tmp_path, model, tensors


def test_without_a_task_no_adapter_of_jinas_embeddings_is_used(
    adapted: tuple[Path, Any, Any],
) -> None:
    folder, model, _ = adapted
    assert_same(folder, outputs(model, "last_hidden_state"))


@pytest.mark.parametrize("task", TASKS)
def test_the_adapter_of_a_task_is_merged_into_jinas_embeddings(
    adapted: tuple[Path, Any, dict[str, torch.Tensor]], tmp_path: Path, task: str
) -> None:
    folder, model, tensors = adapted
    number, plain = TASKS.index(task), tmp_path / "plain"
    model.save_pretrained(plain)
    merged = load_file(plain / "model.safetensors")
    for name in merged:
        layer = f"roberta.{name.removeprefix('roberta.').removesuffix('.weight')}"
        if f"{layer}.parametrizations.weight.original" not in tensors:
            continue
        a, b = (tensors[f"{layer}.parametrizations.weight.0.lora_{part}"][number] for part in "AB")
        change = a @ b if "embeddings" in layer else b @ a
        merged[name] = merged[name] + change * ALPHA / RANK
    save_file(merged, plain / "model.safetensors", metadata={"format": "pt"})
    expected = outputs(type(model).from_pretrained(plain).eval(), "last_hidden_state")
    assert np.abs(expected[0] - outputs(model, "last_hidden_state")[0]).max() > 0.1
    assert_same(folder, expected, hf_overrides={"default_task": task})


def test_a_task_without_an_adapter_is_refused(adapted: tuple[Path, Any, Any]) -> None:
    with pytest.raises(ModelError, match=r"default_task must be one of retrieval.query, .*'paint'"):
        open_llm(adapted[0], hf_overrides={"default_task": "paint"})


def test_jinas_other_models_are_refused_with_those_that_are_supported(tmp_path: Path) -> None:
    make_encoder(tmp_path, "jina_v3")
    with pytest.raises(ModelError, match=r"jina-embeddings-v3 and jina-reranker-v2 are supported"):
        open_llm(tmp_path, hf_overrides={"architectures": ["JinaBertForMaskedLM"]})
