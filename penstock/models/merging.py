"""Merges a LoRA adapter into a model's weights: while they load, or into a new checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from penstock.config import EngineConfig, LoadConfig
from penstock.config.media import MODALITIES
from penstock.layers.build import Build
from penstock.layers.quantization import DenseMethod
from penstock.loading.adapters.merge import MAX_RANK, Merger
from penstock.loading.adapters.read import read_deltas
from penstock.loading.checkpoint import open_checkpoint, read_floats
from penstock.loading.source import ModelSource
from penstock.loading.tasks import choose_task, label_tokens
from penstock.loading.write import ShardWriter, new_checkpoint
from penstock.models.base import Model
from penstock.models.pooler import add_classifier
from penstock.models.registry import build_model
from penstock.ops.blocks import Weight
from penstock.ops.registry import Ops


@dataclass
class MergeReport:
    """What happened to a checkpoint."""

    num_changed: int = 0  # tensors
    num_bytes: int = 0


def make_merger(
    source: ModelSource, adapter: Path, digest: str | None, build: Build, config: EngineConfig
) -> tuple[Merger, Model]:
    """Reads an adapter for the model of `source`. Returns that model too, without weights."""
    # Labels that are tokens are rows of the LM head, which the adapter may change.
    has_labels = choose_task(config, source) == "classify" and label_tokens(config, source) is None
    plain = DenseMethod()
    build = replace(
        build, device=torch.device("meta"), linear_method=plain, tower_method=plain,
        shards_towers=False,
    )  # fmt: skip
    model = build_model(source.config, build, config.model.model_impl)
    if has_labels and build.mesh.is_last_stage:
        add_classifier(model, build, config, source)
    deltas = read_deltas(adapter, model, MAX_RANK, torch.float32, digest)
    return Merger(deltas, model), model


def write_merged(source: ModelSource, adapter: Path, out: Path) -> MergeReport:
    """Write `source` with an adapter merged into its weights, one tensor at a time.

    Raises AdapterError if the adapter does not fit, and as `new_checkpoint`.
    """
    config = EngineConfig()
    generates = (
        choose_task(config, source) == "generate" or label_tokens(config, source) is not None
    )
    build = Build(
        torch.float32,
        torch.device("cpu"),
        1,
        Ops("cpu"),
        generates=generates,
        takes_media=MODALITIES if generates else (),  # the adapter may change a vision tower
    )
    merger, model = make_merger(source, adapter, None, build, config)
    with new_checkpoint(source, out) as new:
        if merger.unties:
            untie(new.config)
        return _merge_tensors(source, merger, model, new.writer)


def untie(config: dict[str, Any]) -> None:
    """Say in a config.json that the LM head has a matrix of its own."""
    config["tie_word_embeddings"] = False
    if isinstance(config.get("text_config"), dict):
        config["text_config"]["tie_word_embeddings"] = False


def _merge_tensors(
    source: ModelSource, merger: Merger, model: Model, writer: ShardWriter
) -> MergeReport:
    report = MergeReport()
    checkpoint = open_checkpoint(source, LoadConfig())
    for name, tensor in read_floats(checkpoint, "Merging"):
        if merger.is_tied_head(name):
            continue
        merged = _merge_tensor(name, tensor, merger, model)
        report.num_changed += merged is not tensor
        report.num_bytes += merged.nbytes
        writer.add(name, merged)
        if merger.unties and (head := merger.head_of(name, tensor)) is not None:
            prefix = "language_model." if name.startswith("language_model.") else ""
            writer.add(f"{prefix}lm_head.weight", head)
            report.num_bytes += head.nbytes
    merger.check_complete()
    return report


def _merge_tensor(name: str, tensor: torch.Tensor, merger: Merger, model: Model) -> torch.Tensor:
    """A checkpoint's tensor, merged. The model may split it into several, as of stacked experts."""
    pieces = list(model.convert([(name, tensor)]))
    if len(pieces) == 1 and pieces[0][1] is tensor:
        merged = merger.merged(pieces[0][0], tensor)
        assert isinstance(merged, torch.Tensor)
        return merged
    result = tensor
    places: dict[str, Weight] = {}  # where the numbers of each piece are in the tensor
    for own_name, piece in pieces:
        merged = merger.merged(own_name, piece)
        if merged is piece:
            continue
        if not places:
            result = tensor.clone()
            numbers = torch.arange(tensor.numel()).view(tensor.shape)
            places = dict(model.convert([(name, numbers)]))
        own_places = places[own_name]
        assert isinstance(own_places, torch.Tensor)
        assert isinstance(merged, torch.Tensor)
        result.view(-1)[own_places.reshape(-1)] = merged.reshape(-1)
    return result
