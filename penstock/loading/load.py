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
from penstock.layers.norm import RMSNorm
from penstock.ops.blocks import Weight
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
    """Stream tensors into the model. Missing, surplus and mis-shaped ones are named."""
    targets = dict(_targets(model))
    missing = set(targets)
    surplus = []
    progress = tqdm(
        tensors, total=total, desc="Loading weights", unit="tensor", disable=not show_progress,
        leave=False, delay=1.0,
    )  # fmt: skip
    for name, tensor in progress:
        own_name = _own_name(name, naming)
        if own_name not in targets:
            if not any(re.search(pattern, name) for pattern in naming.ignored):
                surplus.append(name)
            continue
        target = targets[own_name]
        if tuple(tensor.shape) != target.shape:
            raise ModelError(
                f"tensor {name} has shape {list(tensor.shape)}, "
                f"but the model's configuration asks for {list(target.shape)}"
            )
        target.layer.load(target.parameter, target.part, tensor)
        missing.discard(own_name)
    if missing:
        raise ModelError(f"the checkpoint lacks {_some(sorted(missing))}")
    if surplus:
        raise ModelError(
            f"the checkpoint holds tensors that the model has no place for: {_some(surplus)}"
        )


def fill_dummy(model: nn.Module, seed: int) -> None:
    """Small random weights, made on the device itself; norms are ones."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, RMSNorm):
                parameter.fill_(1.0)
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
            yield f"{owner}.{parameter}", Target(module, parameter, part, shape)


def _own_name(name: str, naming: NamingRules) -> str:
    for pattern, replacement in naming.renamed.items():
        name = re.sub(pattern, replacement, name)
    return name


def _some(names: list[str], limit: int = 5) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
