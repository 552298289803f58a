"""Reading adapters: their weights by the model's layers, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import (
    FLAVOURS,
    WRAPPED,
    MakeAdapter,
    MakeCheckpoint,
    make_adapter,
)
from safetensors.torch import load_file, save_file

from penstock.config import LoadConfig, ModelConfig
from penstock.layers.build import Build
from penstock.loading.adapters.merge import MAX_RANK, Merger
from penstock.loading.adapters.read import read_adapter, read_deltas
from penstock.loading.adapters.source import adapter_digest
from penstock.loading.checkpoint import open_checkpoint
from penstock.loading.load import load_weights
from penstock.loading.source import resolve_source
from penstock.models.registry import build_model
from penstock.ops.registry import Ops
from penstock.protocol.errors import AdapterError


def build(checkpoint: Path, device: str = "meta") -> Any:
    """The model of a checkpoint, without weights."""
    source = resolve_source(ModelConfig(model=str(checkpoint)), LoadConfig())
    return build_model(source.config, Build(torch.float32, torch.device(device), 512, Ops("cpu")))


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    source = resolve_source(ModelConfig(model=str(checkpoint)), LoadConfig())
    return dict(open_checkpoint(source, LoadConfig()).tensors())  # type: ignore[arg-type]


def load(checkpoint: Path) -> Any:
    """The model of a checkpoint, with its weights."""
    model, tensors = build(checkpoint, "cpu"), tensors_of(checkpoint)
    converted = model.convert(tensors.items())
    load_weights(model, model.weights, converted, len(tensors), show_progress=False)
    return model


def merged_by_penstock(checkpoint: Path, adapter: Path) -> dict[str, torch.Tensor]:
    model = build(checkpoint)
    merger = Merger(read_deltas(adapter, model, MAX_RANK, torch.float32), model)
    return dict(merger.merge(model.convert(tensors_of(checkpoint).items())))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["all_linear", "fused_layers", "stacked_experts", "patterns"])
def test_deltas_have_the_scaling_in_b_and_the_model_s_names(
    name: str, checkpoint_of: MakeCheckpoint, adapter_of: MakeAdapter
) -> None:
    checkpoint, adapter = checkpoint_of(FLAVOURS[name].variant), adapter_of(name)
    model = load(checkpoint)
    weights = read_adapter(adapter, model, 64, torch.float32, adapter_digest(adapter))
    merged = merged_by_penstock(checkpoint, adapter)
    base = tensors_of(checkpoint)
    for (path, part), delta in weights.linear.items():
        layer = model.get_submodule(path)
        assert delta.a.shape == (delta.b.shape[1], layer.full_in_features)
        assert len(delta.b) == layer.parts[part].out_features
        name = f"{path.rpartition('.')[0]}.{part}.weight" if part else f"{path}.weight"
        if name in base:
            difference = merged[name] - base[name]
            torch.testing.assert_close(delta.b @ delta.a, difference, rtol=1e-4, atol=1e-5)
    for path, parts in weights.experts.items():
        for part, delta in parts.items():
            name = f"{path.rpartition('.')[0]}.{part}.weight"
            difference = merged[name] - base[name]
            torch.testing.assert_close(delta.b @ delta.a, difference, rtol=1e-4, atol=1e-5)
    assert weights.rank == max(delta.a.shape[0] for delta in weights.linear.values())


def test_an_adapter_of_a_text_model_inside_another_is_found(
    checkpoint_of: MakeCheckpoint, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(WRAPPED.variant)
    make_adapter(tmp_path, checkpoint, **WRAPPED.settings)
    weights = read_adapter(tmp_path, load(checkpoint), 8, torch.float32)
    parts = {part for _, part in weights.linear}
    assert parts == {"q_proj", "v_proj", ""}
    assert len(weights.linear) == 9


def test_stacked_experts_of_older_versions_of_peft_are_read(
    checkpoint_of: MakeCheckpoint, adapter_of: MakeAdapter, tmp_path: Path
) -> None:
    """Those took an expert's inputs for its outputs: a and b changed places."""
    folder = shutil.copytree(adapter_of("stacked_experts"), tmp_path / "older")
    tensors = load_file(folder / "adapter_model.safetensors")
    count, rank = 8, 8
    for name in [name for name in tensors if "experts" in name and "lora_A" in name]:
        other = name.replace("lora_A", "lora_B")
        a = tensors[name].view(count, rank, -1)  # [experts, rank, in]
        b = tensors[other].view(-1, rank, count)  # [out, rank, experts]
        tensors[name] = b.permute(2, 1, 0).reshape(count * rank, -1).contiguous()
        tensors[other] = a.permute(2, 1, 0).reshape(-1, rank * count).contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    model = build(checkpoint_of("qwen3_moe"))
    found = read_deltas(folder, model, 8, torch.float32)
    expected = read_deltas(adapter_of("stacked_experts"), model, 8, torch.float32)
    assert found.experts.keys() == expected.experts.keys()
    for path, parts in expected.experts.items():
        for part, delta in parts.items():
            own = found.experts[path][part]
            torch.testing.assert_close(own.b @ own.a, delta.b @ delta.a)


def test_names_of_a_model_without_its_head_are_found(
    checkpoint_of: MakeCheckpoint, adapter_of: MakeAdapter, tmp_path: Path
) -> None:
    """As peft writes them for embedding models: AutoModel has no ``model.`` before its layers."""
    folder = shutil.copytree(adapter_of("all_linear"), tmp_path / "headless")
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(
        {name.replace("model.model.model.", "model.model."): own for name, own in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    model = build(checkpoint_of("llama"))
    found = read_deltas(folder, model, 8, torch.float32)
    expected = read_deltas(adapter_of("all_linear"), model, 8, torch.float32)
    assert found.linear.keys() == expected.linear.keys()


def test_adapters_of_a_vision_tower_are_skipped(
    checkpoint_of: MakeCheckpoint, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(WRAPPED.variant)
    make_adapter(tmp_path / "both", checkpoint, target_modules=["q_proj"])
    tower = r".*vision_tower.*q_proj"
    make_adapter(tmp_path / "tower", checkpoint, target_modules=tower)
    model = build(checkpoint)
    assert len(read_deltas(tmp_path / "both", model, 8, torch.float32).linear) == 3
    with pytest.raises(AdapterError, match="changes nothing that this model runs"):
        read_deltas(tmp_path / "tower", model, 8, torch.float32)
