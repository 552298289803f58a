"""How a checkpoint's tensors reach a model's parameters, and random ones for benchmarks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from tqdm import tqdm

from penstock.layers.loadable import Loadable
from penstock.layers.matrix import MatrixLayer
from penstock.layers.norm import LayerNorm, RMSNorm
from penstock.ops.blocks import Weight, take_rows
from penstock.protocol.errors import ModelError

DUMMY_SCALE = 0.02


class NamingRules(Protocol):
    @property
    def ignored(self) -> tuple[str, ...]: ...
    @property
    def renamed(self) -> dict[str, str]: ...


@dataclass(frozen=True)
class Target:
    """Where one checkpoint tensor goes."""

    layer: Loadable
    path: str  # the layer's own
    parameter: str
    part: str
    shape: tuple[int, ...]


def load_weights(
    model: nn.Module,
    naming: NamingRules,
    tensors: Iterable[tuple[str, Weight]],
    total: int,
    show_progress: bool = True,
) -> None:
    """Stream tensors into the model. Missing, surplus and mis-shaped ones are named.

    What a layer fuses may come as its parts, or as the one tensor that has them in this order.
    """
    targets = dict(_targets(model))
    fused = _fused(targets)
    missing = set(targets)
    surplus = []
    # Only on a terminal (None): a log on a full disk must not keep an engine from its weights.
    progress = tqdm(
        tensors, total=total, desc="Loading weights", unit="tensor",
        disable=None if show_progress else True, leave=False, delay=1.0,
    )  # fmt: skip
    for name, tensor in progress:
        own_name = _own_name(name, naming)
        parts = fused.get(own_name, [own_name])
        if parts[0] not in targets:
            if not any(re.search(pattern, name) for pattern in naming.ignored):
                surplus.append(name)
            continue
        _, *columns = targets[parts[0]].shape
        shape = [sum(targets[part].shape[0] for part in parts), *columns]
        if list(tensor.shape) != shape:
            raise ModelError(
                f"tensor {name} has shape {list(tensor.shape)}, "
                f"but the model's configuration asks for {shape}"
            )
        start = 0
        for part in parts:
            target = targets[part]
            rows = target.shape[0]
            piece = tensor if len(parts) == 1 else take_rows(tensor, start, start + rows)
            target.layer.load(target.parameter, target.part, piece)
            start += rows
        missing.difference_update(parts)
    if missing:
        raise ModelError(f"the checkpoint lacks {_some(sorted(missing))}")
    if surplus:
        raise ModelError(
            f"the checkpoint holds tensors that the model has no place for: {_some(surplus)}"
        )


def fill_dummy(model: nn.Module, seed: int) -> None:
    """Small random weights, made on the device itself; norms are neutral."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, (RMSNorm, LayerNorm)):
                parameter.fill_(0.0 if name == "bias" else 1.0)
                continue
            generator = torch.Generator(parameter.device).manual_seed(seed)
            parameter.normal_(0.0, DUMMY_SCALE, generator=generator)
            seed += 1
    for _, target in _targets(model):
        layer = target.layer
        if not isinstance(layer, MatrixLayer) or target.parameter != "weight":
            continue
        if layer.build.linear_method.packs:  # it keeps no parameter that could be filled
            generator = torch.Generator().manual_seed(seed)
            weight = torch.empty(target.shape).normal_(0.0, DUMMY_SCALE, generator=generator)
            layer.load("weight", target.part, weight)
            seed += 1


def _targets(model: nn.Module) -> Iterator[tuple[str, Target]]:
    for path, module in model.named_modules():
        if not isinstance(module, Loadable):
            continue
        parent = path.rpartition(".")[0]
        for (parameter, part), shape in module.expected().items():
            owner = f"{parent}.{part}" if part else path
            yield f"{owner}.{parameter}", Target(module, path, parameter, part, shape)


def _fused(targets: dict[str, Target]) -> dict[str, list[str]]:
    """The parts' names, in order, under the name that a tensor with all of them has."""
    fused: dict[str, list[str]] = {}
    for name, target in targets.items():
        if target.part:
            fused.setdefault(f"{target.path}.{target.parameter}", []).append(name)
    return fused


def _own_name(name: str, naming: NamingRules) -> str:
    for pattern, replacement in naming.renamed.items():
        name = re.sub(pattern, replacement, name)
    return name


def _some(names: list[str], limit: int = 5) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
