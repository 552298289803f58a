"""The planner's sizes against those of workers that have loaded the model."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from gguf_builder import write_gguf
from published import PUBLISHED, planner_of, write_config
from tiny_models import make_checkpoint

from penstock.config import EngineConfig
from penstock.distributed.mesh import Mesh, RankGroup
from penstock.executor.worker import Worker
from penstock.kvcache.layout import make_layout
from penstock.loading.gguf.file import read_gguf
from penstock.loading.source import resolve_source
from penstock.planning.hardware import GIB
from penstock.planning.shapes import RankShape, shape_of
from penstock.platforms.platform import detect_platform

TOLERANCE = 0.02
OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "device": "cpu", "cpu_backend": "torch", "cpu_threads": 1,
    "skip_tokenizer_init": True, "max_model_len": 128, "kv_cache_memory_bytes": 2**22,
}  # fmt: skip
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 2, "head_dim": 64}


def open_worker(folder: Path, rank: int, tp: int, **options: Any) -> Worker:
    config = EngineConfig.from_options(
        {"model": str(folder), **OPTIONS, "tensor_parallel_size": tp, **options}
    )
    source = resolve_source(config.model, config.load)
    platform = detect_platform(config.device)
    return Worker(config, source, platform, Mesh(RankGroup(rank, tp)))


def planned(worker: Worker, folder: Path, tp: int) -> RankShape:
    source = resolve_source(worker.config.model, worker.config.load)
    return shape_of(worker.config, source, worker.dtypes, worker.limits.max_model_len, tp)


def weights_of(worker: Worker) -> int:
    model = worker.model
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    "variant",
    ["llama", "qwen3_tied", "qwen3_moe", "deepseek_v3", "gemma3", "gpt_oss", "falcon_h1"],
)
def test_weights_and_cache_are_those_of_a_worker(variant: str, tp: int, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, variant)
    for rank in range(tp):
        worker = open_worker(folder, rank, tp)
        shape = planned(worker, folder, tp)
        assert shape.weight_bytes == pytest.approx(weights_of(worker), rel=TOLERANCE)
        found = worker.capabilities().kv_specs
        assert shape.kv_specs == found
        layouts = [
            make_layout(specs, 16, 128, memory_bytes=2**22) for specs in (shape.kv_specs, found)
        ]
        assert layouts[0].num_blocks == layouts[1].num_blocks


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "fp8"},
        {"quantization": "int8"},
    ],
    ids=["fp8", "int8"],
)  # fmt: skip
def test_weights_quantized_while_loading_are_those_of_a_worker(
    options: dict[str, Any], tp: int, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", **WIDE)
    worker = open_worker(folder, 0, tp, **options)
    shape = planned(worker, folder, tp)
    assert shape.weight_bytes == pytest.approx(weights_of(worker), rel=TOLERANCE)


def test_experts_quantized_while_loading_are_those_of_a_worker(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_moe", hidden_size=128, moe_intermediate_size=128)
    worker = open_worker(folder, 0, 1, quantization="fp8")
    shape = planned(worker, folder, 1)
    assert shape.weight_bytes == pytest.approx(weights_of(worker), rel=TOLERANCE)


def test_a_gguf_file_has_the_size_of_its_blocks(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", "Q8_0")
    tensors = read_gguf(path).tensors.values()
    matrices = sum(own.nbytes for own in tensors if len(own.shape) == 2)
    vectors = sum(2 * math.prod(own.shape) for own in tensors if len(own.shape) == 1)
    planner = planner_of(path, input_len=16, output_len=16)
    assert planner.shape(1).weight_bytes == pytest.approx(matrices + vectors, rel=TOLERANCE)
    halves = planner.shape(2).weight_bytes
    assert halves == pytest.approx(matrices / 2 + vectors, rel=TOLERANCE)


def test_the_cache_on_an_h200_has_the_documented_size(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    found = re.search(r"--max-num-batched-tokens (\d+).*?KV cache: ([\d.]+) GiB", text, re.DOTALL)
    assert found is not None
    folder = write_config(tmp_path, PUBLISHED["Qwen3-8B"])
    planner = planner_of(folder, max_num_batched_tokens=int(found[1]))
    split = planner.split(planner.shape(1), 1)
    assert split.kv_bytes / GIB == pytest.approx(float(found[2]), rel=TOLERANCE)


def test_a_context_of_ten_million_tokens_takes_no_memory_to_plan(tmp_path: Path) -> None:
    settings = {**PUBLISHED["Qwen3-0.6B"], "max_position_embeddings": 10_485_760}
    planner = planner_of(write_config(tmp_path, settings))
    shape = planner.shape(1)
    assert shape.table_bytes == 10_485_760 * 128 * 2, "a cosine and a sine for each dimension"
    assert planner.step_bytes(shape) > shape.table_bytes
