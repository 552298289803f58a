"""The planner's sizes against those of workers that have loaded the model."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_builder import write_gguf
from published import PUBLISHED, planner_of, write_config
from tiny_models import make_checkpoint
from tiny_vision import make_vision_checkpoint

from penstock.config import EngineConfig
from penstock.distributed.mesh import Mesh, RankGroup
from penstock.executor.worker import Worker
from penstock.kvcache.layout import make_layout
from penstock.layers.lora import LinearSlots, make_slots
from penstock.layers.lora_vocab import EmbedSlots, HeadSlots
from penstock.loading.gguf.file import read_gguf
from penstock.loading.source import resolve_source
from penstock.models import assembly, backend
from penstock.planning.hardware import GIB
from penstock.planning.shapes import Partition, RankShape, shape_of
from penstock.platforms.platform import detect_platform

TOLERANCE = 0.02
OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "device": "cpu", "cpu_backend": "torch", "cpu_threads": 1,
    "skip_tokenizer_init": True, "max_model_len": 128, "kv_cache_memory_bytes": 2**22,
}  # fmt: skip
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 2, "head_dim": 64}


def open_worker(folder: Path, mesh: Mesh, **options: Any) -> Worker:
    sizes = {"tensor_parallel_size": mesh.tp.size, "pipeline_parallel_size": mesh.pp.size}
    config = EngineConfig.from_options({"model": str(folder), **OPTIONS, **sizes, **options})
    source = resolve_source(config.model, config.load)
    return Worker(config, source, detect_platform(config.device), mesh)


def planned(worker: Worker) -> RankShape:
    mesh, source = worker.mesh, resolve_source(worker.config.model, worker.config.load)
    partition = Partition(mesh.tp.size, mesh.pp.size, mesh.ep.size)
    limits = worker.limits
    return shape_of(
        worker.config, source, worker.dtypes, limits.max_model_len, partition, mesh.pp.rank
    )


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
        worker = open_worker(folder, Mesh(RankGroup(rank, tp)))
        shape = planned(worker)
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
    worker = open_worker(folder, Mesh(RankGroup(0, tp)), **options)
    shape = planned(worker)
    assert shape.weight_bytes == pytest.approx(weights_of(worker), rel=TOLERANCE)


def test_experts_quantized_while_loading_are_those_of_a_worker(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_moe", hidden_size=128, moe_intermediate_size=128)
    worker = open_worker(folder, Mesh(), quantization="fp8")
    assert planned(worker).weight_bytes == pytest.approx(weights_of(worker), rel=TOLERANCE)


@pytest.mark.parametrize("variant", ["qwen3_tied", "gemma3"])
def test_stages_have_the_sizes_of_their_workers(variant: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, variant)
    for stage in range(2):
        worker = open_worker(folder, Mesh(pp=RankGroup(stage, 2)))
        shape = planned(worker)
        assert shape.weight_bytes == pytest.approx(weights_of(worker), rel=TOLERANCE)
        assert shape.kv_specs == worker.capabilities().kv_specs
        assert (shape.head is None) == (stage == 0)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_whole_experts_have_the_sizes_of_their_workers(
    quantization: str | None, lanes: int, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_moe", hidden_size=128, moe_intermediate_size=128)
    mesh = Mesh(RankGroup(0, 2), ep=RankGroup(0, 2 * lanes))
    options = {"enable_expert_parallel": True, "data_parallel_size": lanes}
    worker = open_worker(folder, mesh, quantization=quantization, **options)
    shape = planned(worker)
    assert shape.weight_bytes == pytest.approx(weights_of(worker), rel=TOLERANCE)
    assert shape.experts[0].num_own == shape.experts[0].num_experts // (2 * lanes)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("only_text", [False, True])
def test_a_vision_tower_counts_if_it_is_loaded(only_text: bool, tp: int, tmp_path: Path) -> None:
    folder = make_vision_checkpoint(tmp_path, "qwen2_5_vl")
    mesh = Mesh(RankGroup(0, tp))
    worker = open_worker(folder, mesh, language_model_only=only_text)
    shape = planned(worker)
    assert shape.weight_bytes == pytest.approx(weights_of(worker), rel=TOLERANCE)
    assert shape.num_layers == len(shape.attention) == len(worker.capabilities().kv_specs)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("variant", ["llama", "qwen3_tied"])
def test_slots_for_adapters_have_the_size_of_a_gpus(variant: str, tp: int, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from penstock.ops.triton.lora import DeviceEmbeddingSlots, DeviceLoraSlots

    lora = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
    worker = open_worker(make_checkpoint(tmp_path, variant), Mesh(RankGroup(0, tp)), **lora)
    dtype, meta, held = worker.dtypes.compute, torch.device("meta"), 0
    for own in make_slots(worker.model, 3, 8, dtype).values():
        if isinstance(own, EmbedSlots):
            size = own.layer.vocab_size, [own.layer.hidden_size]
            table = DeviceEmbeddingSlots(3, *size, 8, dtype, meta)
            held += table.tokens.nbytes + table.b.nbytes + table.vectors.nbytes
        else:
            assert isinstance(own, HeadSlots | LinearSlots)
            layer = own.layer
            rows = [*layer.part_rows.values()]
            slots = DeviceLoraSlots(3, layer.in_features, rows, 8, dtype, meta)
            held += slots.a.nbytes + slots.b.nbytes + slots.vectors.nbytes
    shape = planned(worker)
    assert shape.weight_bytes - weights_of(worker) == pytest.approx(held, rel=TOLERANCE)


def test_a_gguf_file_has_the_size_of_its_blocks(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", "Q8_0")
    tensors = read_gguf(path).tensors.values()
    matrices = sum(own.nbytes for own in tensors if len(own.shape) == 2)
    vectors = sum(2 * math.prod(own.shape) for own in tensors if len(own.shape) == 1)
    planner = planner_of(path, input_len=16, output_len=16)
    (whole,) = planner.stages(Partition())
    assert whole.weight_bytes == pytest.approx(matrices + vectors, rel=TOLERANCE)
    (half,) = planner.stages(Partition(tp=2))
    assert half.weight_bytes == pytest.approx(matrices / 2 + vectors, rel=TOLERANCE)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("types", "tied"), [(["Q8_0"], True), (["Q4_0", "Q5_0", "F16"], False)])
def test_a_gguf_file_has_the_size_that_a_gpus_worker_loads(
    types: list[str], tied: bool, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", types=types, tied=tied)
    file = read_gguf(path)
    monkeypatch.setattr(
        assembly, "choose_backend", lambda *_: backend._gguf_on_gpu(file, torch.bfloat16)
    )
    for rank in range(tp):
        worker = open_worker(path, Mesh(RankGroup(rank, tp)), load_format="auto")
        assert planned(worker).weight_bytes == pytest.approx(weights_of(worker), rel=TOLERANCE)


def test_the_cache_on_an_h200_has_the_documented_size(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    found = re.search(r"--max-num-batched-tokens (\d+).*?KV cache: ([\d.]+) GiB", text, re.DOTALL)
    assert found is not None
    folder = write_config(tmp_path, PUBLISHED["Qwen3-8B"])
    planner = planner_of(folder, max_num_batched_tokens=int(found[1]))
    split = planner.split(Partition(), 1)
    assert split.kv_bytes / GIB == pytest.approx(float(found[2]), rel=TOLERANCE)


def test_a_context_of_ten_million_tokens_takes_no_memory_to_plan(tmp_path: Path) -> None:
    settings = {**PUBLISHED["Qwen3-0.6B"], "max_position_embeddings": 10_485_760}
    planner = planner_of(write_config(tmp_path, settings))
    (shape,) = planner.stages(Partition())
    assert shape.table_bytes == 10_485_760 * 128 * 2, "a cosine and a sine for each dimension"
    assert planner.step_bytes(shape) > shape.table_bytes
