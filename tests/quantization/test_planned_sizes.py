"""What `penstock plan` says of quantized checkpoints, against workers that have loaded them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import quantized_checkpoints as made

from penstock.config import EngineConfig
from penstock.distributed.mesh import Mesh, RankGroup
from penstock.executor.worker import Worker
from penstock.loading.source import resolve_source
from penstock.planning.shapes import Partition, RankShape, shape_of
from penstock.platforms.platform import detect_platform

FORMATS = {"awq": made.awq, "gptq": made.gptq, "fp8": lambda: made.fp8("tensor")}


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.make_floats(tmp_path_factory.mktemp("floats"), num_hidden_layers=1)


def configured(folder: Path, **options: Any) -> EngineConfig:
    own = {"device": "cpu", "cpu_backend": "torch", "cpu_threads": 1, "dtype": "bfloat16"}
    return EngineConfig.from_options({"model": str(folder), **own, **options})


def planned(folder: Path, worker: Worker, tp: int) -> RankShape:
    config = configured(folder, load_format="dummy")
    source = resolve_source(config.model, config.load)
    return shape_of(config, source, worker.dtypes, worker.limits.max_model_len, Partition(tp))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_checkpoint_has_the_size_that_a_worker_loads(
    name: str, tp: int, floats: Path, tmp_path: Path
) -> None:
    folder, _ = made.quantize(floats, tmp_path, *FORMATS[name]())
    config = configured(folder, tensor_parallel_size=tp)
    source = resolve_source(config.model, config.load)
    worker = Worker(config, source, detect_platform(config.device), Mesh(RankGroup(0, tp)))
    model = worker.model
    size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert planned(folder, worker, tp).weight_bytes == pytest.approx(size, rel=0.02)
    if tp == 1:  # its configuration alone, as of a hub id
        alone = tmp_path / "alone"
        alone.mkdir()
        (alone / "config.json").write_text(json.dumps(source.config))
        assert planned(alone, worker, tp).weight_bytes == pytest.approx(size, rel=0.02)
