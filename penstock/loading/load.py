"""Loads a checkpoint's tensors into a model's parameters, or random weights for benchmarks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from tqdm import tqdm

from penstock.layers.loadable import ANY, Expected, Loadable
from penstock.layers.matrix import MatrixLayer
from penstock.layers.norm import LayerNorm, RMSNorm
from penstock.loading.kv_scales import KVScales
from penstock.ops.blocks import Weight, take_rows
from penstock.protocol.errors import ModelError

DUMMY_SCALE = 0.02


class NamingRules(Protocol):
    @property
    def ignored(self) -> tuple[str, ...]: ...
    @property
    def renamed(self) -> dict[str, str]: ...
    @property
    def elsewhere(self) -> tuple[str, ...]: ...


@runtime_checkable
class Finishing(Protocol):
    """A layer with work to do once all of its weights, and those of its parts, are loaded."""

    def finish_loading(self) -> None: ...


@dataclass(frozen=True)
class Target:
    """The destination of one checkpoint tensor."""

    layer: Loadable
    path: str  # path of the layer
    parameter: str
    part: str
    expected: Expected

    @property
    def shape(self) -> tuple[int, ...]:
        return self.expected.shape


def load_weights(
    model: nn.Module,
    naming: NamingRules,
    tensors: Iterable[tuple[str, Weight]],
    total: int,
    show_progress: bool = True,
    ignored: tuple[str, ...] = (),
) -> None:
    """Stream tensors into the model. Errors name missing, surplus and misshapen ones.

    The parts of a fused layer may come separately, or as one tensor that holds them in this order.
    Surplus tensors that match an `ignored` pattern, of the caller or the model, are skipped.
    """
    targets = dict(_targets(model))
    fused = _fused(targets)
    missing = set(targets)
    kv_scales = KVScales(model)
    surplus = []
    # Only on a terminal (None): a log on a full disk must not keep an engine from loading.
    progress = tqdm(
        tensors, total=total, desc="Loading weights", unit="tensor",
        disable=None if show_progress else True, leave=False, delay=1.0,
    )  # fmt: skip
    for name, tensor in progress:
        model_name = own_name(name, naming)
        parts = fused.get(model_name, [model_name])
        if parts[0] not in targets:
            if kv_scales.take(model_name, tensor):
                continue
            is_ignored = any(re.search(pattern, name) for pattern in (*naming.ignored, *ignored))
            if not is_ignored and not is_elsewhere(name, naming):
                surplus.append(name)
            continue
        own = [targets[part] for part in parts]
        for target, piece in zip(own, _pieces(name, tensor, own), strict=True):
            try:
                target.layer.load(target.parameter, target.part, piece)
            except ModelError as error:
                raise ModelError(f"tensor {name}: {error}") from error
        missing.difference_update(parts)
    if missing:
        raise ModelError(f"the checkpoint lacks {_some(sorted(missing))}")
    if surplus:
        hint = ""
        if any(name.rpartition(".")[0].endswith("lm_head") for name in surplus):
            hint = (
                "; if the output projection is not the embedding, set tie_word_embeddings to false "
                "in config.json"
            )
        raise ModelError(f"the checkpoint has unexpected tensors: {_some(surplus)}{hint}")
    _finish(model)


def fill_dummy(model: nn.Module, seed: int) -> None:
    """Fill a model with small random weights, generated on the device. Norms are neutral."""
    from penstock.layers.quantized.dummy import fill_quantized
    from penstock.layers.quantized.linear import QuantizedMethod

    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_norm = isinstance(module, (RMSNorm, LayerNorm))
            if is_norm or "Norm" in type(module).__name__:  # transformers' have no common class
                parameter.fill_(0.0 if name == "bias" else 1.0)
                continue
            generator = torch.Generator(parameter.device).manual_seed(seed)
            parameter.normal_(0.0, DUMMY_SCALE, generator=generator)
            seed += 1
    for _, target in _targets(model):
        layer = target.layer
        if not isinstance(layer, MatrixLayer) or target.parameter != "weight":
            continue
        if isinstance(layer.method, QuantizedMethod):
            continue
        if layer.method.packs:  # no parameter to fill
            generator = torch.Generator().manual_seed(seed)
            weight = torch.empty(target.shape).normal_(0.0, DUMMY_SCALE, generator=generator)
            layer.load("weight", target.part, weight)
            seed += 1
    for module in model.modules():
        seed += fill_quantized(module, DUMMY_SCALE, seed)
    _finish(model)


def _finish(model: nn.Module) -> None:
    for module in [*model.modules()]:  # a copy: modules may replace their parts
        if isinstance(module, Finishing):
            module.finish_loading()


def _targets(model: nn.Module) -> Iterator[tuple[str, Target]]:
    for path, module in model.named_modules():
        if not isinstance(module, Loadable):
            continue
        parent = path.rpartition(".")[0]
        try:
            wanted = module.expected()
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from error
        for (parameter, part), known in wanted.items():
            expected = known if isinstance(known, Expected) else Expected(known)
            owner = f"{parent}.{part}" if part else path
            yield f"{owner}.{parameter}", Target(module, path, parameter, part, expected)


def _fused(targets: dict[str, Target]) -> dict[str, list[str]]:
    """The names of the parts, in order, by the name of a tensor that holds all of them."""
    fused: dict[str, list[str]] = {}
    for name, target in targets.items():
        if target.part:
            fused.setdefault(f"{target.path}.{target.parameter}", []).append(name)
    return fused


def _pieces(name: str, tensor: Weight, targets: list[Target]) -> list[Weight]:
    """The share of each part of a tensor. Raises ModelError for a wrong shape."""
    first = targets[0].expected
    rows, shape = first.rows, list(first.shape)
    sizes = [0 if rows is None else target.shape[rows] for target in targets]
    if rows is not None:
        shape[rows] = sum(sizes)
    if ANY in shape and len(shape) == len(tensor.shape):
        shape = [own if n == ANY else n for n, own in zip(shape, tensor.shape, strict=True)]
    if list(tensor.shape) != shape:
        # Writers store scales as [], [1] or [out, 1].
        is_scale = isinstance(tensor, torch.Tensor) and targets[0].parameter != "weight"
        if not is_scale or [n for n in tensor.shape if n != 1] != [n for n in shape if n != 1]:
            raise ModelError(
                f"tensor {name} has shape {list(tensor.shape)}, "
                f"but the model's configuration asks for {shape}"
            )
        assert isinstance(tensor, torch.Tensor)
        tensor = tensor.reshape(shape)
    if len(targets) == 1 or rows is None:
        return [tensor] * len(targets)
    if isinstance(tensor, torch.Tensor):
        return list(torch.split(tensor, sizes, dim=rows))
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [take_rows(tensor, at, at + size) for at, size in zip(starts, sizes, strict=True)]


def own_name(name: str, naming: NamingRules) -> str:
    """The model's name of a checkpoint tensor."""
    for pattern, replacement in naming.renamed.items():
        name = re.sub(pattern, replacement, name)
    return name


def is_elsewhere(name: str, naming: NamingRules) -> bool:
    """Whether a checkpoint tensor belongs to another rank: its stage or its experts."""
    if not naming.elsewhere:
        return False
    name = own_name(name, naming)
    return any(re.search(pattern, name) for pattern in naming.elsewhere)


def _some(names: list[str], limit: int = 5) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
