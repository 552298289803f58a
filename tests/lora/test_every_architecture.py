"""No fused or native path may pass an adapter by: on every architecture, an adapter of all layers
gives what a model with merged weights gives."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_slots import open_with_slots, random_adapter, runner_of, slots_of
from tiny_encoders import ENCODERS, make_encoder
from tiny_engine import open_llm, random_prompts
from tiny_models import make_checkpoint

from penstock import LLM, SamplingParams
from penstock.layers.embedding import VocabEmbedding
from penstock.layers.experts import ExpertWeights
from penstock.layers.linear import Linear
from penstock.layers.lora import AdapterWeights, PartDelta
from penstock.models import assembly
from penstock.models.architectures import ARCHITECTURES

PROMPTS = random_prompts(6, 5, 21)
# One of each kind of layer. The others share their code, but for a few lines.
FEW = ("llama_rope_yarn", "gemma3", "qwen3_tied", "qwen3_next", "deepseek_v3_halves", "gpt_oss")
OTHERS = sorted({known.parity[-1] for known in ARCHITECTURES.values()} - {*FEW})
EVERY = [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
FEW_ENCODERS = ("bert", "modernbert")
EVERY_ENCODER = [
    *FEW_ENCODERS,
    *(pytest.param(name, marks=pytest.mark.slow) for name in sorted({*ENCODERS} - {*FEW_ENCODERS})),
]
Output = tuple[torch.Tensor, Sequence[list[int]]]
Compute = Callable[[LLM], Output]


def generated(llm: LLM) -> Output:
    """The log-probabilities of the prompts' tokens, and the tokens that follow."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    logprobs = [
        position[token_id].logprob
        for output in outputs
        for token_id, position in zip(
            output.prompt_token_ids or [], output.prompt_logprobs or [], strict=True
        )
        if position
    ]
    assert len(logprobs) == 24
    return torch.tensor(logprobs), [list(output.outputs[0].token_ids) for output in outputs]


def embedded(llm: LLM) -> Output:
    outputs = llm.embed(PROMPTS, use_tqdm=False)
    return torch.tensor([output.outputs.embedding for output in outputs]), ()


def merge_while_loading(weights: AdapterWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add an adapter's deltas to the tensors of models that are loaded from now on."""
    load_weights = assembly.load_weights

    def load(model: Any, *args: Any, **options: Any) -> None:
        for path, module in model.named_modules():
            if isinstance(module, Linear | VocabEmbedding | ExpertWeights):
                own = partial(_delta_of, weights, path, module)
                module.__dict__["load"] = partial(_load_merged, module.load, own)
        load_weights(model, *args, **options)

    monkeypatch.setattr(assembly, "load_weights", load)


def _load_merged(load: Any, delta_of: Any, parameter: str, part: str, tensor: torch.Tensor) -> None:
    load(parameter, part, tensor + delta_of(part) if parameter == "weight" else tensor)


def _delta_of(weights: AdapterWeights, path: str, module: Any, part: str) -> torch.Tensor | float:
    delta: PartDelta | None
    single = re.fullmatch(r"(.*\.experts)\.(\d+)\.(?:gate_up|down)_proj", path)
    if isinstance(module, VocabEmbedding):
        delta = weights.embedding[path]
        whole = delta.b @ delta.a
        return whole if path.endswith("lm_head") else whole.T
    if isinstance(module, ExpertWeights):
        delta = weights.experts[path][part]
    elif single is not None:
        delta = weights.experts[single[1]][f"experts.{single[2]}.{part or 'down_proj'}"]
    else:
        delta = weights.linear.get((path, part))  # not of a layer that takes no adapters
    return 0.0 if delta is None else delta.b @ delta.a


def check(
    checkpoint: Path, compute: Compute, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    with open_with_slots(checkpoint, **options) as (llm, slots):
        base, _base_tokens = compute(llm)
        adapter = random_adapter(slots_of(runner_of(llm)))
        slots.place(2, adapter)
        slots.use(2)
        found, tokens = compute(llm)
        slots.use(2, -1)
        mixed, _ = compute(llm)
    merge_while_loading(adapter, monkeypatch)
    with open_llm(checkpoint, enable_prefix_caching=False, **options) as llm:
        expected, expected_tokens = compute(llm)
    size = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * size)
    assert tokens == expected_tokens
    assert float((found - base).abs().max()) > 0.02 * size
    own = len(base) * 4 // 24 if compute is generated else 1  # of the first prompt
    torch.testing.assert_close(mixed[:own], found[:own], rtol=1e-3, atol=1e-3 * size)
    torch.testing.assert_close(mixed[own:], base[own:], rtol=1e-3, atol=1e-3 * size)


@pytest.mark.parametrize("variant", EVERY)
def test_an_adapter_of_all_layers_is_the_merged_decoder(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(make_checkpoint(tmp_path, variant), generated, monkeypatch)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("variant", EVERY_ENCODER)
def test_an_adapter_of_all_layers_is_the_merged_encoder(
    variant: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_encoder(tmp_path, variant)
    options = {"cpu_backend": backend, "max_model_len": 64}
    check(tmp_path, embedded, monkeypatch, **options)


@pytest.mark.parametrize("variant", ["llama", "mixtral"])
def test_an_adapter_of_all_layers_is_the_merged_transformers_model(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint(tmp_path, variant)
    check(checkpoint, generated, monkeypatch, model_impl="transformers")
