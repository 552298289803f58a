"""Turns an adapter's tensors into changes of a model's layers.

`plan` checks every name and shape against the model. Only then does `read` touch the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from penstock.layers.lora import PartDelta
from penstock.loading.adapters.config import AdapterConfig
from penstock.loading.adapters.places import Place, Places, StackedPlace
from penstock.loading.adapters.tensors import Weights, is_spare, parse_name
from penstock.protocol.errors import AdapterError

Slot = tuple[str, str]  # module and part

_PAIR = frozenset(("a", "b", "bias", "magnitude"))


@dataclass
class AdapterDeltas:
    """What an adapter changes, by the names of the model's layers."""

    rank: int = 0  # the largest
    linear: dict[Slot, PartDelta] = field(default_factory=dict)
    experts: dict[str, dict[str, PartDelta]] = field(default_factory=dict)
    embedding: dict[str, PartDelta] = field(default_factory=dict)  # `HEAD` for a tied head too
    biases: dict[Slot, torch.Tensor] = field(default_factory=dict)  # instead of the layer's own
    # Matrices instead of the model's, of an embedding, a head or a label head.
    replaced: dict[str, torch.Tensor] = field(default_factory=dict)
    # Matrices that peft stores beside adapters of them. Usually equal to the base's.
    copies: dict[str, torch.Tensor] = field(default_factory=dict)
    # Rows of the embedding, by token, instead of the model's.
    tokens: dict[str, tuple[list[int], torch.Tensor]] = field(default_factory=dict)


class DeltaReader:
    """Reads one adapter."""

    def __init__(
        self,
        weights: Weights,
        path: Path,
        config: AdapterConfig,
        places: Places,
        max_rank: int,
        dtype: torch.dtype,
    ) -> None:
        self._weights, self._path, self._config = weights, path, config
        self._places, self._max_rank, self._dtype = places, max_rank, dtype
        self._steps: list[Callable[[AdapterDeltas], None]] = []
        self._owners: dict[tuple[str, str, str], str] = {}  # kind, module, part -> tensor
        self._rank = 0

    def plan(self) -> None:
        """Check all tensors against the model. Raises AdapterError."""
        modules: dict[str, dict[str, str]] = {}  # module -> kind -> tensor
        for name in self._weights.infos:
            if is_spare(name, self._weights.infos):
                continue
            module, kind = parse_name(name, self._path)
            kinds = modules.setdefault(module, {})
            if kind in kinds:
                raise self._error(name, f"{module} has it twice, also as {kinds[kind]}")
            kinds[kind] = name
        for module, kinds in modules.items():
            self._plan_module(module, kinds)
        if not self._steps and not self._places.is_stage:  # others may have all that it changes
            raise AdapterError(
                f"{self._path} changes nothing that this model runs: was it trained on another "
                "model?"
            )

    def read(self) -> AdapterDeltas:
        """The adapter's weights, once they are loaded. Raises AdapterError if any is not finite."""
        deltas = AdapterDeltas(self._rank)
        for step in self._steps:
            step(deltas)
        return deltas

    def _plan_module(self, module: str, kinds: dict[str, str]) -> None:
        pair = {kind: name for kind, name in kinds.items() if kind in _PAIR}
        if "embedding_a" in kinds or "embedding_b" in kinds:
            self._plan_embedding(module, kinds)
        elif pair:
            stacked = self._places.find_stacked(module)
            if stacked is None:
                self._plan_pair(module, pair)
            else:
                self._plan_stacked(module, stacked, pair)
        if name := kinds.get("whole_bias"):
            self._plan_bias(module, name)
        for kind in ("whole", "copy"):
            if name := kinds.get(kind):
                self._plan_whole(module, name, is_copy=kind == "copy")
        if name := kinds.get("tokens"):
            self._plan_tokens(module, name)

    # -- linear layers

    def _plan_pair(self, module: str, names: Mapping[str, str]) -> None:
        a, b = self._both(module, names, "a", "b")
        rank, columns = self._shape(a, 2)
        rows, b_rank = self._shape(b, 2)
        if rank != b_rank:
            raise self._error(b, f"has shape {[rows, b_rank]}, but {a} has {rank} rows")
        places = self._places.find(module, rows)
        if not places:
            return
        outputs = sum(place.out_features for place in places)
        if any(place.in_features != columns for place in places) or rows != outputs:
            raise self._error(
                a if rows == outputs else b,
                f"the adapter's {module} has {columns} inputs and {rows} outputs, the model's has "
                f"{places[0].in_features} and {outputs}: it was trained on another model",
            )
        if places[0].kind == "embedding":
            raise self._error(a, "an embedding's adapter has lora_embedding_A, not lora_A")
        self._check_rank(module, rank, a)
        for kind in ("bias", "magnitude"):
            if kind in names:
                self._vector(names[kind], rows)
        for place in places:
            self._claim(place.kind, place.module, place.part, a)
        scaling = self._config.scaling_of(module, rank)
        self._steps.append(lambda deltas: self._read_pair(deltas, names, places, scaling))

    def _read_pair(
        self, deltas: AdapterDeltas, names: Mapping[str, str], places: list[Place], scaling: float
    ) -> None:
        a = self._floats(names["a"])
        b = self._floats(names["b"], scaling)
        magnitude, bias = self._magnitude(names), None
        if "bias" in names:
            bias = self._floats(names["bias"], scaling).reshape(-1)
        for place in places:
            rows = place.rows
            delta = PartDelta(
                a,
                b[rows],
                None if magnitude is None else magnitude[rows],
                None if bias is None else bias[rows],
            )
            if place.kind == "expert":
                deltas.experts.setdefault(place.module, {})[place.part] = delta
            elif place.kind == "head":
                deltas.embedding[place.module] = delta
            else:
                deltas.linear[place.module, place.part] = delta

    # -- experts

    def _plan_stacked(self, module: str, place: StackedPlace, names: Mapping[str, str]) -> None:
        """Plan the matrices of all experts of a layer in two tensors.

        Their shapes tell what they are: whether of gate_up_proj or down_proj, and whether peft took
        the inputs for the outputs, as older versions did.
        """
        a, b = self._both(module, names, "a", "b")
        count = place.config.num_experts
        total, columns = self._shape(a, 2)
        rows, b_total = self._shape(b, 2)
        if total != b_total or total % count or not total:
            raise self._error(
                a, f"{total} rows and {b_total} columns of {b} are not ranks of {count} experts"
            )
        surplus = set(names) - {"a", "b"}
        if surplus:
            raise self._error(names[min(surplus)], "stacked experts have only lora_A and lora_B")
        hidden, size = place.config.hidden_size, place.config.intermediate_size
        shapes = {"gate_up_proj": (hidden, 2 * size), "down_proj": (size, hidden)}
        found = [
            (matrix, is_swapped)
            for is_swapped in (False, True)
            for matrix, shape in shapes.items()
            if (rows, columns) == (shape if is_swapped else shape[::-1])
        ]
        if not found:
            raise self._error(
                a,
                f"the adapter's experts have {columns} inputs and {rows} outputs, the model's have "
                f"{hidden} and {2 * size} (gate_up_proj) or {size} and {hidden} (down_proj)",
            )
        matrix, is_swapped = found[0]
        rank = total // count
        experts = module.removesuffix(".base_layer")
        key = f"{experts}.{matrix}"
        self._check_rank(key, rank, a)
        outputs = shapes[matrix][1]
        parts = {"down_proj": torch.arange(outputs)}
        if matrix == "gate_up_proj":
            parts = self._places.split_rows(experts, outputs)
        for expert in range(count):
            for part in parts:
                self._claim("expert", place.module, f"experts.{expert}.{part}", a)
        scaling = self._config.scaling_of(key, rank)

        def read(deltas: AdapterDeltas) -> None:
            lhs = self._floats(b, scaling).view(rows, rank, count).permute(2, 0, 1)
            rhs = self._floats(a).view(count, rank, columns)
            if is_swapped:
                lhs, rhs = rhs.transpose(1, 2), lhs.transpose(1, 2)
            own = deltas.experts.setdefault(place.module, {})
            for expert in range(count):
                for part, index in parts.items():
                    own[f"experts.{expert}.{part}"] = PartDelta(rhs[expert], lhs[expert][index])

        self._steps.append(read)

    # -- the embedding and the head

    def _plan_embedding(self, module: str, names: Mapping[str, str]) -> None:
        a, b = self._both(module, names, "embedding_a", "embedding_b")
        rank, vocab_size = self._shape(a, 2)
        hidden, b_rank = self._shape(b, 2)
        places = self._places.find(module, hidden)
        if not places:
            return
        place = places[0]
        if place.kind != "embedding":
            raise self._error(a, f"{module} is no embedding in this model")
        if rank != b_rank or (vocab_size, hidden) != (place.in_features, place.out_features):
            raise self._error(
                a,
                f"the adapter's embedding has {vocab_size} tokens of {hidden} numbers (rank {rank} "
                f"and {b_rank}), the model's {place.in_features} of {place.out_features}",
            )
        self._check_rank(module, rank, a)
        if "magnitude" in names:
            self._vector(names["magnitude"], hidden)
        self._claim("embedding", place.module, "", a)
        scaling = self._config.scaling_of(module, rank)

        def read(deltas: AdapterDeltas) -> None:
            deltas.embedding[place.module] = PartDelta(
                self._floats(a), self._floats(b, scaling), self._magnitude(names)
            )

        self._steps.append(read)

    def _plan_whole(self, module: str, name: str, is_copy: bool) -> None:
        try:
            places = self._places.find(module, self._weights.infos[name].shape[0])
        except (AdapterError, IndexError) as error:
            raise self._not_replaceable(name, module) from error
        if not places:
            return
        place = places[0]
        if place.kind not in ("embedding", "head") and (is_copy or place.kind != "labels"):
            raise self._not_replaceable(name, module)
        sizes = (place.in_features, place.out_features)
        shape = sizes if place.kind == "embedding" else sizes[::-1]
        if self._shape(name, 2) != shape:
            what = "other labels" if place.kind == "labels" else "added tokens"
            raise self._error(
                name,
                f"has shape {list(self._weights.infos[name].shape)}, the model's is {list(shape)}: "
                f"if it was trained with {what}, serve the model that has them",
            )
        self._claim("copy" if is_copy else "whole", place.module, "", name)

        def read(deltas: AdapterDeltas) -> None:
            target = deltas.copies if is_copy else deltas.replaced
            dtype = torch.float32 if place.kind == "labels" else self._dtype
            target[place.module] = self._floats(name, dtype=dtype)

        self._steps.append(read)

    def _plan_tokens(self, module: str, name: str) -> None:
        tokens = self._config.tokens_of(module)
        places = self._places.find(module, self._shape(name, 2)[1])
        if not places:
            return
        place = places[0]
        if place.kind != "embedding" or tokens is None:
            raise self._error(name, f"trainable_token_indices does not name tokens of {module}")
        shape = (len(tokens), place.out_features)
        valid = all(0 <= token < place.in_features for token in tokens)
        if self._shape(name, 2) != shape or not valid or len(set(tokens)) < len(tokens):
            raise self._error(
                name,
                f"must have the shape {list(shape)} of trainable_token_indices, distinct tokens "
                f"below {place.in_features}",
            )
        self._check_rank(module, len(tokens), name, is_declared=False)
        self._claim("tokens", place.module, "", name)

        def read(deltas: AdapterDeltas) -> None:
            deltas.tokens[place.module] = tokens, self._floats(name, dtype=torch.float32)

        self._steps.append(read)

    def _plan_bias(self, module: str, name: str) -> None:
        (rows,) = self._shape(name, 1)
        try:
            places = self._places.find(module, rows)
        except AdapterError as error:
            why = f"only biases of linear layers can be replaced: {error}"
            raise self._error(name, why) from error
        for place in places:
            if place.kind not in ("linear", "labels") or not self._places.has_bias(place.module):
                raise self._error(name, f"the model's {module} has no bias that could be replaced")
        if not places:
            return
        self._vector(name, sum(place.out_features for place in places))
        for place in places:
            self._claim("bias", place.module, place.part, name)

        def read(deltas: AdapterDeltas) -> None:
            bias = self._floats(name, dtype=torch.float32)
            for place in places:
                deltas.biases[place.module, place.part] = bias[place.rows]

        self._steps.append(read)

    # -- checks

    def _both(self, module: str, names: Mapping[str, str], *kinds: str) -> list[str]:
        if not names.keys() >= set(kinds):
            raise self._error(
                min(names.values()), f"{module} lacks its other matrix: the file is incomplete"
            )
        if self._config.use_dora and "magnitude" not in names:
            raise AdapterError(
                f"{self._path}: use_dora is set, but {module} lacks its lora_magnitude_vector: "
                "the file is incomplete"
            )
        return [names[kind] for kind in kinds]

    def _shape(self, name: str, num_dims: int) -> tuple[int, ...]:
        shape = self._weights.infos[name].shape
        if len(shape) != num_dims or 0 in shape:
            raise self._error(name, f"must have {num_dims} dimensions, got shape {list(shape)}")
        return shape

    def _vector(self, name: str, size: int) -> None:
        shape = self._weights.infos[name].shape
        if [n for n in shape if n != 1] != ([size] if size != 1 else []):
            raise self._error(name, f"must have the shape [{size}], got {list(shape)}")

    def _check_rank(self, module: str, rank: int, name: str, is_declared: bool = True) -> None:
        declared = self._config.rank_of(module) if is_declared else None
        if declared is not None and rank != declared:
            raise self._error(
                name,
                f"has rank {rank}, but adapter_config.json says {declared} (r or rank_pattern)",
            )
        if rank > self._max_rank:
            raise self._error(
                name, f"has rank {rank}, the limit is {self._max_rank}: raise --max-lora-rank"
            )
        self._rank = max(self._rank, rank)

    def _claim(self, kind: str, module: str, part: str, name: str) -> None:
        other = self._owners.setdefault((kind, module, part), name)
        if other != name:
            raise self._error(name, f"changes the same weights as {other}")

    def _floats(
        self, name: str, scaling: float = 1.0, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """A tensor times `scaling`. Raises AdapterError for numbers that are not finite."""
        stored = self._weights.tensor(name)
        floats = (stored.float() * scaling if scaling != 1.0 else stored).to(dtype or self._dtype)
        if not bool(torch.isfinite(floats).all()):
            is_own = not bool(torch.isfinite(stored).all())
            why = "" if is_own else f" as {floats.dtype}: choose another --lora-dtype"
            raise self._error(name, f"has numbers that are not finite{why}")
        return floats

    def _magnitude(self, names: Mapping[str, str]) -> torch.Tensor | None:
        if "magnitude" not in names:
            return None
        return self._floats(names["magnitude"], dtype=torch.float32).reshape(-1)

    def _not_replaceable(self, name: str, module: str) -> AdapterError:
        return self._error(
            name,
            f"{module} was trained as a whole (modules_to_save): only the embedding, the LM head "
            "and a classifier can be replaced; merge the adapter into the model with peft",
        )

    def _error(self, name: str, why: str) -> AdapterError:
        return AdapterError(f"{self._path}: tensor {name:.200}: {why}")
