"""Steps with images on the way of a GPU, without one: they must give the plain path's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_vision import InProcessMedia, make_vision_checkpoint, picture
from vision_variants import VARIANTS

from penstock import LLM, SamplingParams
from penstock.ops import registry
from penstock.runner.encoder_graphs import EncoderGraphs
from penstock.runner.generation import GenerationHead
from penstock.runner.graphs import GraphPool
from penstock.runner.media import MediaStore
from penstock.runner.runner import ModelRunner
from penstock.runner.sampler import Sampler

pytest.importorskip("triton", reason="needs Triton")

from penstock.ops.triton.sampling import choose_tokens
from penstock.runner.device_steps import DeviceSteps
from penstock.runner.device_tables import DeviceTables
from penstock.runner.sampling_graphs import SamplingGraphs

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled for the GPU there: see tests/gpu"
)

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "cpu_threads": 1, "cpu_backend": "torch", "max_model_len": 128,
    "max_num_seqs": 4, "max_num_batched_tokens": 64, "log_level": "error",
    "kv_cache_memory_bytes": 2**24,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def take_device_path(runner: ModelRunner, vocab_size: int) -> None:
    """Put the parts that a GPU has into a CPU's runner."""
    assert runner.media is not None
    encoder: Any = runner.media.encoder
    encoder._encode = EncoderGraphs(runner.media.model.tower, GraphPool(enabled=False)).encode
    tables = DeviceTables(4, 128, runner.tables.groups, CPU, 0)
    runner.media = MediaStore(runner.media.model, tables, encoder, num_adapter_slots=0)
    steps = DeviceSteps(
        runner.model, vocab_size, tables, runner.memory, max_num_batched_tokens=64, num_drafts=0,
        capture_graphs=False, dtype=torch.float32, media=runner.media,
    )  # fmt: skip
    sampler = Sampler(tables, vocab_size, CPU, choose_tokens)
    head = GenerationHead(runner.model, tables, sampler, None)
    head.graphs = SamplingGraphs(steps.buffers, steps.logits, tables, sampler, steps.pool)
    runner.tables, runner.steps, runner.head = tables, steps, head


def generate(llm: LLM, folder: Path, name: str) -> list[list[int]]:
    """An image, and text beside it."""
    assert llm.frontend.media is not None
    llm.frontend.media.pool = InProcessMedia(folder)
    image = {"image": picture(56, 56)}
    given: list[Any] = [
        {"prompt": f"a{VARIANTS[name].image}b", "multi_modal_data": image},
        "t",
    ]
    outputs = llm.generate(given, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_vl",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("qwen2_5_vl", "gemma3", "idefics3")
        ),
    ],
)
def test_steps_with_images_give_the_plain_paths_tokens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M-RoPE at decode, features for later layers, spans, and tiles that are padded."""
    folder = make_vision_checkpoint(tmp_path, name)
    with LLM(str(folder), **OPTIONS) as llm:
        expected = generate(llm, folder, name)
    monkeypatch.setitem(registry.BACKENDS, "cpu", registry.BACKENDS["cuda"])
    with LLM(str(folder), **OPTIONS) as llm:
        worker: Any = llm.engine.executor.worker  # type: ignore[attr-defined]
        take_device_path(worker.runner, worker.model.vocab_size)
        assert generate(llm, folder, name) == expected
