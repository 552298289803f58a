"""Pooling models on a GPU: the CPU's vectors in float32, and in graphs the same bits."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_runs import SETTINGS
from lora_slots import open_with_slots, random_adapter, runner_of, slots_of
from tiny_encoders import DECODERS, ENCODERS, make_encoder
from tiny_engine import random_prompts
from tiny_models import make_checkpoint

from penstock import LLM, PoolingParams
from penstock.runner.device_batch import Bucket

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
POOLING: dict[str, Any] = {**SETTINGS, "max_model_len": 120, "cpu_backend": "torch"}
DECODER: dict[str, Any] = {**POOLING, "runner": "pooling", "block_size": 16}
# Steps of every size: one text, a few, and more than the largest graph holds.
BATCHES = [
    [{"prompt_token_ids": [max(token, 8) for token in prompt["prompt_token_ids"]]}
     for prompt in random_prompts(seed, *lengths)]
    for seed, lengths in enumerate([(100,), (1, 2, 5, 17, 33, 64), (3,), (120,) * 60, (1, 1, 1)])
]  # fmt: skip


def encoder_of(folder: Path, variant: str, head: str = "Model") -> Path:
    """A checkpoint, or a skip where transformers does not know the architecture yet."""
    import transformers

    name, _ = (ENCODERS | DECODERS)[variant]
    if not hasattr(transformers, f"{name}{head}"):
        pytest.skip(f"needs a GPU and a transformers with {name}{head}")
    make_encoder(folder, variant, head)
    return folder


def open_llm(checkpoint: Path, **options: Any) -> LLM:
    return LLM(str(checkpoint), **{**POOLING, "dtype": "float32", **options})


def vectors_of(llm: LLM, params: PoolingParams | None = None) -> list[Any]:
    """Of all batches, each of which runs twice: the second time in graphs."""
    found = []
    for _, batch in itertools.product(range(2), BATCHES):
        outputs = llm.encode(batch, params, use_tqdm=False)
        assert [output.error for output in outputs] == [None] * len(batch)
        found += [np.asarray(output.outputs.data) for output in outputs]
    return found


def pooled(checkpoint: Path, params: PoolingParams | None = None, **options: Any) -> list[Any]:
    with open_llm(checkpoint, **options) as llm:
        return vectors_of(llm, params)


def assert_close(found: list[Any], expected: list[Any], tolerance: float = 2e-4) -> None:
    for own, theirs in zip(found, expected, strict=True):
        assert own.dtype == np.float32
        np.testing.assert_allclose(own, theirs, atol=tolerance, rtol=tolerance)


def captured_of(llm: LLM) -> set[Bucket]:
    return set(llm.engine.executor.worker.runner.steps._captured)  # type: ignore[attr-defined]


@ON_GPU
@pytest.mark.parametrize("variant", ENCODERS | DECODERS)
def test_vectors_of_encoders_are_the_cpus(variant: str, tmp_path: Path) -> None:
    checkpoint = encoder_of(tmp_path, variant)
    expected = pooled(checkpoint, device="cpu")
    with open_llm(checkpoint, device="cuda") as llm:
        assert_close(vectors_of(llm), expected)
        assert captured_of(llm)
    assert_close(pooled(checkpoint, device="cuda", enforce_eager=True), expected)


@ON_GPU
@pytest.mark.parametrize("variant", ["bert", "modernbert"])
@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForTokenClassification"])
def test_labels_of_encoders_are_the_cpus(variant: str, head: str, tmp_path: Path) -> None:
    checkpoint = encoder_of(tmp_path, variant, head)
    expected = pooled(checkpoint, device="cpu")
    assert_close(pooled(checkpoint, device="cuda"), expected)


@ON_GPU
@pytest.mark.parametrize("kind", ["MEAN", "CLS", "LAST"])
def test_every_kind_of_pooling_is_the_cpus(kind: str, tmp_path: Path) -> None:
    checkpoint = encoder_of(tmp_path, "bert")
    options = {"pooler_config": {"pooling_type": kind}}
    expected = pooled(checkpoint, device="cpu", **options)
    assert_close(pooled(checkpoint, device="cuda", **options), expected)


@ON_GPU
def test_vectors_of_tokens_are_the_cpus(tmp_path: Path) -> None:
    checkpoint = encoder_of(tmp_path, "bert")
    params = PoolingParams(task="token_embed", use_activation=False)
    expected = pooled(checkpoint, params, device="cpu")
    assert_close(pooled(checkpoint, params, device="cuda"), expected)


@ON_GPU
@pytest.mark.parametrize("variant", ["bert", "modernbert"])
def test_graphs_change_no_bit_of_a_vector_in_bfloat16(variant: str, tmp_path: Path) -> None:
    checkpoint = encoder_of(tmp_path, variant)
    graphs, eager = (
        pooled(checkpoint, device="cuda", dtype="bfloat16", enforce_eager=eager)
        for eager in (False, True)
    )
    for own, theirs in zip(graphs, eager, strict=True):
        np.testing.assert_array_equal(own, theirs)


def distances(found: list[Any], exact: list[Any]) -> torch.Tensor:
    pairs = zip(found, exact, strict=True)
    return torch.tensor([float(np.linalg.norm(own - theirs)) for own, theirs in pairs])


@ON_GPU
@pytest.mark.parametrize("variant", ["bert", "modernbert"])
def test_bfloat16_is_as_near_to_exact_as_on_a_cpu(variant: str, tmp_path: Path) -> None:
    checkpoint = encoder_of(tmp_path, variant)
    exact = pooled(checkpoint, device="cpu")
    other = distances(pooled(checkpoint, device="cpu", dtype="bfloat16"), exact)
    ours = distances(pooled(checkpoint, device="cuda", dtype="bfloat16"), exact)
    assert float(ours.mean()) < 1.5 * float(other.mean())


@ON_GPU
@pytest.mark.parametrize("kind", ["LAST", "MEAN", "CLS"])
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 48},
                                     {"max_num_seqs": 3}])  # fmt: skip
def test_vectors_of_decoders_are_the_cpus(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """In chunks, behind cached prefixes, and in graphs."""
    checkpoint = make_checkpoint(tmp_path, "qwen3")
    common = {**DECODER, "pooler_config": {"pooling_type": kind}}
    expected = pooled(checkpoint, device="cpu", **common)
    assert_close(pooled(checkpoint, device="cuda", **common, **options), expected)


@ON_GPU
@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification"])
@pytest.mark.parametrize("eager", [False, True])
def test_vectors_and_labels_with_adapters_are_the_cpus(
    head: str, eager: bool, tmp_path: Path
) -> None:
    checkpoint = encoder_of(tmp_path, "bert", head)
    found = []
    for device in ("cpu", "cuda"):
        options = {**POOLING, "dtype": "float32", "device": device, "enforce_eager": eager}
        with open_with_slots(checkpoint, **options) as (llm, slots):
            for slot, rank in ((0, 4), (2, 9)):
                slots.place(slot, random_adapter(slots_of(runner_of(llm)), rank, seed=slot))
            slots.use(2, 0, -1)
            found.append(vectors_of(llm))
    assert_close(found[1], found[0], 1e-3)
