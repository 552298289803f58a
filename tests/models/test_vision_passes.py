"""Passes of vision towers: the largest, padded ones, and graphs of those that repeat."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from replay_pool import ReplayPool
from tiny_vision import make_vision_checkpoint
from vision_variants import VARIANTS

from penstock.config import EngineConfig
from penstock.distributed.mesh import Mesh
from penstock.executor import encoder_memory, kv_budget
from penstock.loading.source import resolve_source
from penstock.models.assembly import load_model
from penstock.models.vision import TILE_COUNTS, MediaInputs, TileTower, VisionModel, media_limits
from penstock.platforms.platform import detect_platform
from penstock.protocol.errors import ConfigError
from penstock.protocol.limits import StepLimits
from penstock.runner import encoder_graphs
from penstock.runner.encoder_graphs import EncoderGraphs

SLOW = pytest.mark.slow
CPU = torch.device("cpu")
TILED = ("gemma3", "llava", "internvl", "paligemma", "llama4", "qwen2_vl", "glm4v")
LIMITS = StepLimits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=512)


def load(folder: Path, name: str) -> tuple[Any, EngineConfig]:
    make_vision_checkpoint(folder, name)
    config = EngineConfig.from_options(
        {"model": str(folder), "dtype": "float32", "encoder_cache_tokens": 300}
    )
    source = resolve_source(config.model, config.load)
    model, *_ = load_model(config, source, detect_platform(config.device), Mesh(), 512)
    return model, config


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("qwen2_5_vl", "mistral3", "idefics3") else SLOW)
        for name in VARIANTS
    ],
)
@torch.inference_mode()
def test_a_blank_pass_has_nearly_as_many_rows_as_asked(name: str, tmp_path: Path) -> None:
    model, _ = load(tmp_path, name)
    for num_rows in (1, 64, 300):
        given = model.tower.blank(num_rows)
        rows = model.tower(given.pixels, model.tower.arrange(given.shape))
        found = rows.flatten(0, -2).shape
        assert found[1] == model.media_width
        assert found[0] <= max(num_rows, rows.shape[-2] if rows.dim() == 3 else 1)
        assert found[0] > num_rows * 0.8 - 17
        assert given.num_patches >= found[0]


def test_memory_for_media_is_not_given_to_the_kv_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = load(tmp_path, "qwen3_vl")
    limits = media_limits(model, LIMITS, config)
    assert (limits.encoder_rows, limits.encoder_width) == (300, 3 * 64)
    kept = (300 + 64) * 3 * 64 * 4
    assert encoder_memory.embeddings_bytes(model, limits) == kept
    total, passes = 16 << 30, [1 << 30]
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=total)
    )
    monkeypatch.setattr(kv_budget, "measure_peak_step", lambda *_: 2 << 30)
    monkeypatch.setattr(encoder_memory, "measure_pass", lambda *_: passes[0])
    platform: Any = SimpleNamespace(
        device=torch.device("cuda"), available_memory=lambda: total, max_num_seqs=1
    )

    def budget(own: StepLimits, handed: torch.dtype | None = None) -> int:
        return kv_budget.kv_budget(config, platform, model, {}, own, handed_dtype=handed)

    without = budget(LIMITS)
    assert budget(limits) == without - kept, "the step needs more than the tower"
    assert budget(limits, torch.float32) == without, "the first pipeline stage encodes"
    passes[0] = 5 << 30
    assert budget(limits) == without - kept - (3 << 30)
    passes[0] = total
    with pytest.raises(ConfigError, match=r"embeddings of media .*encoder_cache_tokens"):
        budget(limits)


@torch.inference_mode()
def test_the_largest_pass_is_run_to_measure_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = load(tmp_path, "qwen2_vl")
    seen: list[int] = []
    model.tower.register_forward_hook(lambda tower, given, rows: seen.append(len(rows)))

    def peak(device: torch.device, compute: Callable[[], None]) -> int:
        compute()
        return 7

    monkeypatch.setattr(encoder_memory, "peak_bytes", peak)
    assert encoder_memory.measure_pass(model, media_limits(model, LIMITS, config), CPU) == 7
    assert seen == [17 * 17]


def images(model: VisionModel, *sizes: int) -> list[MediaInputs]:
    """Items of random pixels: tiles of a `TileTower`, or squares on a side of others."""
    tower, found = model.tower, []
    for size in sizes:
        if isinstance(tower, TileTower):
            tensor = torch.randn(size, *tower.tower.tile)
            found.append(MediaInputs("image", {"pixel_values": tensor}, {}))
        else:
            grid = [1, 2 * size, 2 * size]
            width = tower.blank(1).pixels.shape[1]
            tensor = torch.randn(4 * size * size, width)
            found.append(MediaInputs("image", {"pixel_values": tensor}, {"grid_thw": grid}))
    return found


@pytest.mark.parametrize(
    "name", ["qwen2_5_vl", "qwen3_vl", "idefics3", *(pytest.param(n, marks=SLOW) for n in TILED)]
)
@torch.inference_mode()
def test_passes_whose_shapes_repeat_are_captured(name: str, tmp_path: Path) -> None:
    """With the same rows as before, whatever the pixels."""
    model, _ = load(tmp_path, name)
    pool = ReplayPool()
    graphs = EncoderGraphs(model.tower, pool)
    for number, sizes in enumerate([(2, 3), (2, 3), (2, 3), (4,), (2, 3)]):
        items = images(model, *sizes)
        found = [rows.clone() for rows in graphs.encode(items)]
        torch.testing.assert_close(found, model.tower.encode(items), rtol=1e-4, atol=1e-5)
        assert pool.num_captured == (number > 0)
    assert pool.num_replayed == 3


@torch.inference_mode()
def test_tiles_are_padded_to_few_numbers(tmp_path: Path) -> None:
    model, _ = load(tmp_path, "idefics3")
    pool = ReplayPool()
    graphs = EncoderGraphs(model.tower, pool)
    for sizes in ((5,), (1, 4), (6,), (2, 1, 3)):  # all padded to 6
        items = images(model, *sizes)
        found = graphs.encode(items)
        assert [len(rows) for rows in found] == [4 * size for size in sizes]
        torch.testing.assert_close(found, model.tower.encode(items), rtol=1e-4, atol=1e-5)
    assert (pool.num_captured, pool.num_replayed) == (1, 3)
    most = images(model, 2 * TILE_COUNTS[-1] + 1)  # in three passes, two of one shape
    assert [len(each.pixels) for each in model.tower.join(most)] == [64, 64, 1]
    torch.testing.assert_close(graphs.encode(most), model.tower.encode(most), rtol=1e-4, atol=1e-5)
    assert pool.num_captured == 2


@torch.inference_mode()
def test_graphs_are_few_and_of_small_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = load(tmp_path, "qwen2_vl")
    monkeypatch.setattr(encoder_graphs, "MAX_GRAPHS", 2)
    monkeypatch.setattr(encoder_graphs, "MAX_SHAPES", 3)
    pool = ReplayPool()
    graphs = EncoderGraphs(model.tower, pool)

    def encode(*sizes: int) -> None:
        for size in sizes:
            graphs.encode(images(model, size))

    encode(1, 2, 3, 4, 1)
    assert pool.num_captured == 0, "the first shape is forgotten"
    encode(4, 1, 2, 2)
    assert pool.num_captured == 2
    monkeypatch.setattr(encoder_graphs, "MAX_PADDED_WORK", 1.0)
    large = ReplayPool()
    graphs = EncoderGraphs(model.tower, large)
    encode(1, 1, 1)
    assert large.num_captured == 0
