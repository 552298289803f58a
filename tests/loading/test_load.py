"""Tensors reach the model one at a time."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch
from tiny_engine import open_llm
from tiny_models import config_of, make_checkpoint

from penstock import SamplingParams
from penstock.config import LoadConfig, ModelConfig
from penstock.layers.build import Build
from penstock.loading.checkpoint import open_checkpoint
from penstock.loading.load import fill_dummy, load_weights
from penstock.loading.source import resolve_source
from penstock.models.registry import build_model
from penstock.ops.registry import Ops


@torch.inference_mode()
def test_no_tensor_of_the_checkpoint_outlives_its_turn(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    source = resolve_source(ModelConfig(model=str(folder)), LoadConfig())
    checkpoint = open_checkpoint(source, LoadConfig())
    model = build_model(source.config, Build(torch.float32, torch.device("cpu"), 64, Ops("cpu")))
    most = 0

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        alive: list[weakref.ref[torch.Tensor]] = []
        for name, tensor in checkpoint.tensors():
            alive = [ref for ref in alive if ref() is not None]
            alive.append(weakref.ref(tensor))
            most = max(most, len(alive))
            yield name, tensor

    load_weights(model, model.weights, watched(), len(checkpoint.names()), show_progress=False)
    # The one at hand, and the one before it until its names are bound anew.
    assert most <= 2


def test_dummy_weights_need_a_configuration_alone_and_repeat_with_the_seed(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3")))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    tokens = []
    for seed in (1, 1, 2):
        with open_llm(tmp_path, load_format="dummy", seed=seed) as llm:
            (output,) = llm.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)
            tokens.append(output.outputs[0].token_ids)
    assert tokens[0] == tokens[1]
    assert tokens[0] != tokens[2]


def test_dummy_weights_run_as_loaded_ones_do(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    with open_llm(folder, load_format="dummy") as llm:
        model = llm.engine.executor.worker.model  # type: ignore[attr-defined]
        assert all(layer.fused is not None for layer in model.model.layers)
        params = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True, seed=1, logprobs=9)
        prompts = [{"prompt_token_ids": [5, 6, 7 + index] * 9} for index in range(5)]
        together = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        for prompt, expected in zip(prompts, together, strict=True):
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            assert output.outputs[0].logprobs == expected.logprobs


def test_dummy_norms_are_ones_and_other_weights_differ(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    source = resolve_source(ModelConfig(model=str(folder)), LoadConfig(load_format="dummy"))
    model = build_model(source.config, Build(torch.float32, torch.device("cpu"), 64, Ops("cpu")))
    fill_dummy(model, seed=0)
    assert (model.model.norm.weight == 1).all()
    first, second = (layer.mlp.down_proj.weight for layer in model.model.layers[:2])
    assert not torch.equal(first, second)
