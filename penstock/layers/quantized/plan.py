"""Decides which layer has which scheme, from the checkpoint or the user's option."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import nn

from penstock.layers.embedding import VocabEmbedding
from penstock.layers.experts import DeferredExperts, Experts, expert_parts
from penstock.layers.matrix import MatrixLayer
from penstock.layers.quantization import DeferredQuantization, LinearMethod
from penstock.layers.quantized.experts import decide_experts
from penstock.layers.quantized.linear import Finish, QuantizedMethod
from penstock.layers.quantized.patterns import Expression, try_expressions
from penstock.layers.quantized.schemes import Fp8Scheme, Scheme
from penstock.protocol.errors import ModelError

logger = logging.getLogger(__name__)

Kind = Literal["linear", "router", "vocabulary"]
# All experts' matrices in one tensor of floats. Quantized ones have other names.
_STACKED = frozenset({"gate_up_proj", "down_proj"})


class Quantization(Protocol):
    """What a configuration says about layers."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Patterns of tensors that the model does not use."""

    @property
    def expressions(self) -> tuple[Expression, ...]:
        """The regular expressions that `scheme` uses. They must be tried first."""

    def scheme(self, name: str, kind: Kind) -> Scheme | None:
        """The scheme of the layer that checkpoints call `name`; None: plain floats."""


@dataclass(frozen=True)
class StoredLayer:
    """What a checkpoint contains of one layer."""

    name: str  # in the checkpoint
    tensors: frozenset[str]  # parameters


class StoredLayers:
    """A checkpoint's layers, under the model's names."""

    def __init__(self, names: Iterable[tuple[str, str]]) -> None:
        """`names` are pairs of a tensor's names: in the model, and in the checkpoint."""
        tensors: dict[str, set[str]] = {}
        stored: dict[str, str] = {}
        for own, name in names:
            layer, _, parameter = own.rpartition(".")
            tensors.setdefault(layer, set()).add(parameter)
            stored[layer] = name.rpartition(".")[0]
        self._layers = {
            layer: StoredLayer(stored[layer], frozenset(parameters))
            for layer, parameters in tensors.items()
        }

    def find(self, own_name: str) -> StoredLayer | None:
        return self._layers.get(own_name)

    def find_stacked(self, own_name: str) -> StoredLayer | None:
        """The layer that stores an expert's matrix together with those of all other experts."""
        path, found, _ = own_name.rpartition(".experts.")
        layer = self.find(f"{path}.experts") if found else None
        return layer if layer is not None and layer.tensors & _STACKED else None


def assign_methods(
    model: nn.Module,
    quantization: Quantization,
    plain: LinearMethod,
    stored: StoredLayers | None = None,
    finish: Finish | None = None,
) -> None:
    """Give every layer of a model built with deferred methods its method.

    Layers stored as floats get `plain`. Without `stored` (dummy weights), the configuration alone
    decides. Raises ModelError for fused layers whose parts are stored differently, and for patterns
    that are wrong or too slow.
    """
    if quantization.expressions:
        try_expressions(quantization.expressions, _asked_names(model, stored))
    counts: Counter[str] = Counter()
    for path, module in list(model.named_modules()):
        if isinstance(module, Experts) and isinstance(module.experts, DeferredExperts):
            names = _part_names(path, module)
            own, present = _agreed(quantization, stored, f"{path}.experts", names, "linear")
            module.experts, module.choice = decide_experts(module.experts, plain, own, present)
            counts[own.label if own else "not quantized"] += 1
    for path, module in list(model.named_modules()):
        if not isinstance(module, MatrixLayer) or not isinstance(
            module.method, DeferredQuantization
        ):
            continue
        names = _part_names(path, module)
        own, present = _agreed(quantization, stored, path, names, _kind(module))
        if own is None or (stored is None and not module.may_quantize):
            module.use(plain)
        else:
            embeds = path.rpartition(".")[2] == "embed_tokens"
            module.use(QuantizedMethod(own, present, finish, embeds))
        counts[own.label if own else "not quantized"] += 1
    summary = ", ".join(f"{count} {label}" for label, count in counts.most_common())
    logger.info("Layers by quantization: %s", summary)


def _kind(module: MatrixLayer) -> Kind:
    if isinstance(module, VocabEmbedding):
        return "vocabulary"
    return "linear" if module.may_quantize else "router"


def _agreed(
    quantization: Quantization,
    stored: StoredLayers | None,
    path: str,
    names: Mapping[str, str],  # by part
    kind: Kind,
) -> tuple[Scheme | None, dict[str, Collection[str]]]:
    """The common scheme of all parts, and which of its tensors each part has."""
    schemes: dict[str, Scheme | None] = {}
    present: dict[str, Collection[str]] = {}
    for part, own_name in names.items():
        layer = _find_layer(stored, path, own_name)
        scheme = quantization.scheme(layer.name if layer is not None else own_name, kind)
        if scheme is not None and layer is not None:
            present[part] = layer.tensors
            if isinstance(scheme, Fp8Scheme):
                scheme = scheme.named_as(layer.tensors)
            is_float = "weight" in layer.tensors and not scheme.marks & layer.tensors
            if scheme.marks and (is_float or layer.tensors & _STACKED):
                scheme = None  # stored as floats, whatever the configuration says
        schemes[part] = scheme
    kinds = list(dict.fromkeys(schemes.values()))
    if len(kinds) == 1:
        return kinds[0], present
    said = "; ".join(
        f"{part}: {scheme.label if scheme else 'not quantized'}" for part, scheme in schemes.items()
    )
    raise ModelError(
        f"the parts of {path} are computed as one matrix, but the checkpoint has them quantized "
        f"differently ({said:.400}): quantize the model with the same scheme for all of them"
    )


def _find_layer(stored: StoredLayers | None, path: str, own_name: str) -> StoredLayer | None:
    """How the checkpoint stores a part: stacked with others, already fused, or alone."""
    if stored is None:
        return None
    return stored.find(path) or stored.find(own_name) or stored.find_stacked(own_name)


def _asked_names(model: nn.Module, stored: StoredLayers | None) -> list[str]:
    """All names that the configuration will be asked about."""
    names: dict[str, None] = {}
    for path, module in model.named_modules():
        owner = f"{path}.experts" if isinstance(module, Experts) else path
        for own_name in _part_names(path, module).values():
            layer = _find_layer(stored, owner, own_name)
            names[own_name if layer is None else layer.name] = None
    return list(names)


def _part_names(path: str, module: nn.Module) -> dict[str, str]:
    """The names of a layer's matrices by part; {} if the layer needs no decision."""
    if isinstance(module, Experts) and isinstance(module.experts, DeferredExperts):
        return {part: f"{path}.{part}" for part in expert_parts(module.experts.config)}
    if isinstance(module, MatrixLayer) and isinstance(module.method, DeferredQuantization):
        return {part: _sibling(path, part) for part in module.part_rows}
    return {}


def _sibling(path: str, part: str) -> str:
    return f"{path.rpartition('.')[0]}.{part}" if part else path
