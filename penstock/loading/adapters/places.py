"""Finds the layers of a model that an adapter's modules change.

Names go the way of checkpoint tensors: through the model's `convert` and its renaming. So an
adapter of a fused layer is split here, and one of a part of a fused layer finds it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from penstock.layers.embedding import VocabEmbedding
from penstock.layers.experts import Experts, ExpertsConfig, expert_parts
from penstock.layers.linear import Linear
from penstock.loading.load import is_elsewhere, own_name
from penstock.protocol.errors import AdapterError

HEAD = "lm_head"
_WRAPPERS = (
    (r"^(?:model\.)?language_model\.(?:model\.)?(?!lm_head)", "model."),
    (r"^(?:model\.)?language_model\.(?=lm_head)", ""),
    (r"^(?!model\.|lm_head$)", "model."),
)


Kind = Literal["linear", "labels", "expert", "embedding", "head"]


class Place(NamedTuple):
    """A part of a layer, and which rows of the adapter's module are this part."""

    kind: Kind
    module: str
    part: str
    out_features: int
    in_features: int
    rows: torch.Tensor | None = None  # None: all, in this order


@dataclass(frozen=True)
class StackedPlace:
    """All experts of a layer."""

    module: str
    config: ExpertsConfig


class Places:
    """The layers of a model by the names that adapters have for them."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._parts: dict[str, Place] = {}  # by the name of a checkpoint's module
        self._fused: dict[str, list[str]] = {}
        self._experts: dict[str, ExpertsConfig] = {}
        for path, module in model.named_modules():
            if isinstance(module, Experts):
                self._experts[f"{path}.experts"] = module.config
        for path, module in model.named_modules():
            self._add(path, module)
        has_head = HEAD in self._parts or getattr(model, HEAD, None) is not None
        build = getattr(model, "build", None)
        num_stages = 1 if build is None else build.mesh.pp.size
        self.is_stage = num_stages > 1  # of a pipeline: the model lacks the layers of others
        self._num_stages = num_stages
        embeddings = [place for place in self._parts.values() if place.kind == "embedding"]
        self.is_tied = (
            not has_head
            and build is not None
            and build.generates
            and build.mesh.is_last_stage
            and len(embeddings) == 1
        )
        self.embedding = embeddings[0].module if embeddings else ""
        if self.is_tied:
            # The embedding is the head too. An adapter may change one and not the other.
            own = embeddings[0]
            self._parts[HEAD] = Place("head", HEAD, "", own.in_features, own.out_features)

    def _add(self, path: str, module: nn.Module) -> None:
        if isinstance(module, VocabEmbedding):
            shape = (module.vocab_size, module.hidden_size)
            is_head = path.rpartition(".")[2] == HEAD
            kind: Kind = "head" if is_head else "embedding"
            self._parts[path] = Place(kind, path, "", *(shape if is_head else shape[::-1]))
        elif isinstance(module, Linear) and not self._is_of_expert(path):
            parent = path.rpartition(".")[0]
            names = [f"{parent}.{part}" if part else path for part in module.parts]
            kind = "labels" if module.is_label_head else "linear"
            for name, part in zip(names, module.parts.values(), strict=True):
                self._parts[name] = Place(
                    kind, path, part.name, part.out_features, module.full_in_features
                )
            if len(names) > 1:
                self._fused[path] = names
        elif path in self._experts:
            config = self._experts[path]
            parent = path.rpartition(".")[0]
            for name in expert_parts(config):
                rows, columns = expert_shape(config, name)
                self._parts[f"{parent}.{name}"] = Place("expert", path, name, rows, columns)

    def _is_of_expert(self, path: str) -> bool:
        return any(path.startswith(f"{experts}.") for experts in self._experts)

    def find(self, module: str, num_rows: int) -> list[Place]:
        """The parts that a module with so many outputs changes; [] if the model does not run it.

        Raises AdapterError, with the nearest names, if the model has no such module.
        """
        for name in self._candidates(module):
            rows = torch.arange(num_rows)[:, None]
            found: list[Place] = []
            for own, index in self._model.convert([(f"{name}.weight", rows)]):
                found += self._parts_of(own, index.reshape(-1))
            if found:
                return found
        if self._is_ignored(module):
            return []
        raise AdapterError(self._unmatched(module))

    def find_stacked(self, module: str) -> StackedPlace | None:
        """The experts that a module holds all of."""
        for name in self._candidates(re.sub(r"(\.base_layer)+$", "", module)):
            own = self.own(f"{name}.weight").removesuffix(".weight")
            if own in self._experts:
                return StackedPlace(own, self._experts[own])
        return None

    def split_rows(self, module: str, num_rows: int) -> dict[str, torch.Tensor]:
        """Which rows of a stacked gate_up_proj are the gate's, and which are up's."""
        rows = torch.arange(num_rows)
        stacked = rows.view(1, 1, num_rows)  # [experts, in, out], as checkpoints have them
        found: dict[str, torch.Tensor] = {}
        for name, index in self._model.convert([(f"{module}.gate_up_proj", stacked)]):
            found[name.removesuffix(".weight").rpartition(".")[2]] = index.reshape(-1)
        if found.keys() != {"gate_proj", "up_proj"}:  # this model does not split them
            gate, up = rows.chunk(2)
            found = {"gate_proj": gate, "up_proj": up}
        return found

    def changed_by(self, tensor: str) -> list[Place]:
        """The parts whose weights a checkpoint's tensor holds, in order; after `convert`."""
        name = self.own(tensor).rpartition(".")[0]
        names = self._fused.get(name, [name])
        return [self._parts[each] for each in names if each in self._parts]

    def is_label_head(self, path: str) -> bool:
        """Whether the layer at this path follows pooling."""
        place = self._parts.get(path)
        return place is not None and place.kind == "labels"

    def has_bias(self, path: str) -> bool:
        """Whether the linear layer at this path has a bias."""
        layer = self._model.get_submodule(path)
        return isinstance(layer, Linear) and layer.bias is not None

    def max_bytes(self, max_rank: int) -> int:
        """More than any adapter of this rank has, in 64-bit floats."""
        per_rank = sum(place.in_features + place.out_features for place in self._parts.values())
        whole = sum(
            place.in_features * place.out_features
            for place in self._parts.values()
            if place.kind in ("embedding", "head", "labels")
        )
        vectors = 4 * sum(place.out_features for place in self._parts.values())
        if self.is_stage:  # the file has all stages' shares, which are about equal
            per_rank, vectors = self._num_stages * per_rank, self._num_stages * vectors
            whole = max(whole, 2 * self._model.vocab_size * self._model.hidden_size)
        return 8 * (max_rank * per_rank + 2 * whole + vectors) + 2**26

    def _candidates(self, module: str) -> Iterator[str]:
        """A module's name, and what it may be called if another class wraps the text model."""
        yield module
        for pattern, replacement in _WRAPPERS:
            other, count = re.subn(pattern, replacement, module)
            if count:
                yield other

    def own(self, tensor: str) -> str:
        """The model's name of a checkpoint's tensor."""
        return own_name(tensor, self._model.weights)

    def _parts_of(self, tensor: str, rows: torch.Tensor) -> list[Place]:
        name = self.own(tensor).removesuffix(".weight")
        names = self._fused.get(name, [name] if name in self._parts else [])
        places = [self._parts[each] for each in names]
        if len(places) == 1:
            return [places[0]._replace(rows=rows)]
        if len(rows) != sum(place.out_features for place in places):
            return [place._replace(rows=rows) for place in places]  # of a wrong size
        split = torch.split(rows, [place.out_features for place in places]) if places else ()
        return [place._replace(rows=own) for place, own in zip(places, split, strict=True)]

    def _is_ignored(self, module: str) -> bool:
        naming = self._model.weights
        if any(re.search(pattern, f"{module}.weight") for pattern in naming.ignored):
            return True
        names = self._candidates(module)
        return any(is_elsewhere(f"{name}.weight", naming) for name in names)

    def _unmatched(self, module: str) -> str:
        others = re.compile(r"\.experts\.[1-9]")  # than the first expert: too many to compare
        names = [name for name in (*self._parts, *self._fused) if not others.search(name)]
        close = difflib.get_close_matches(module, names, 3, 0.6)
        if not close:
            layer = re.sub(r"\d+", "0", module)
            close = difflib.get_close_matches(layer, names, 3, 0.0)
        return (
            f"the adapter changes {module:.200}, which the model does not have; the nearest are "
            f"{', '.join(close)}. Was it trained on another model?"
        )


def expert_shape(config: ExpertsConfig, part: str) -> tuple[int, int]:
    """The outputs and inputs of an expert's matrix."""
    hidden, size = config.hidden_size, config.intermediate_size
    return (hidden, size) if part.endswith("down_proj") else (size, hidden)
