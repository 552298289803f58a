"""Adds an adapter to a checkpoint's tensors: the model then needs no adapter.

The sum is computed in float32 and rounded once, to the tensor's type.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from penstock.layers.lora import PartDelta, add_delta
from penstock.loading.adapters.deltas import AdapterDeltas, Slot
from penstock.loading.adapters.places import HEAD, Place, Places
from penstock.ops.blocks import BlockTensor, Weight
from penstock.ops.gguf_blocks import dequantize
from penstock.protocol.errors import AdapterError

# Parameters of layers whose weights are not floats.
_QUANTIZED = re.compile(r"qweight|weight_packed|weight_scale.*|scales|qzeros|.*absmax.*")
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
MAX_RANK = 2**14  # of an adapter to merge: ranks take no memory afterwards


class Merger:
    """Adds one adapter's deltas to tensors."""

    def __init__(self, deltas: AdapterDeltas, model: Any) -> None:
        """`model` may be without weights. It is the one that the deltas were read for."""
        self._deltas = deltas
        self._places = Places(model)
        self._is_tied = self._places.is_tied
        self._left = self._changes()
        # The adapter changes embedding and head differently, but the checkpoint has one matrix.
        self.unties = self._is_tied and not self._is_same_for_head()
        if self._is_tied and not self.unties:
            self._left.discard((HEAD, ""))

    def merge(self, tensors: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        """Tensors that `model.convert` returned, with the adapter added.

        Those that it does not change are passed on. Raises AdapterError if one is missing.
        """
        for name, tensor in tensors:
            if self.is_tied_head(name):
                continue
            yield name, self.merged(name, tensor)
            if self.unties and (head := self.head_of(name, tensor)) is not None:
                yield f"{HEAD}.weight", head
        yield from self._new_labels()
        self.check_complete()

    @property
    def changes_experts(self) -> bool:
        """Whether any matrix of an expert changes."""
        return bool(self._deltas.experts)

    def is_tied_head(self, name: str) -> bool:
        """Whether a tensor is the head of a model whose embedding is the head."""
        return self._is_tied and self._places.own(name) == f"{HEAD}.weight"

    def merged(self, name: str, tensor: Weight) -> Weight:
        """A tensor with the adapter's change of it."""
        places, parameter = self._places.changed_by(name), name.rpartition(".")[2]
        is_float = isinstance(tensor, BlockTensor) or tensor.dtype in _FLOATS
        if _QUANTIZED.fullmatch(parameter) or not is_float:
            self._refuse_quantized(name, places)
        if parameter not in ("weight", "bias"):
            return tensor
        touched = [place for place in places if self._touches(place, parameter)]
        if not touched:
            return tensor
        whole = _floats(tensor)
        sizes = [_rows(place) for place in places]
        if sum(sizes) != len(whole):
            return tensor  # which the loader refuses
        pieces = torch.split(whole, sizes)
        merged = [
            self._add(piece, place, parameter) if place in touched else piece
            for piece, place in zip(pieces, places, strict=True)
        ]
        dtype = whole.dtype if isinstance(tensor, BlockTensor) else tensor.dtype
        return torch.cat(merged).to(dtype)

    def head_of(self, name: str, tensor: Weight) -> torch.Tensor | None:
        """The head's own matrix, if `tensor` is the embedding that was the head too."""
        places = self._places.changed_by(name)
        if not places or places[0].kind != "embedding" or not name.endswith(".weight"):
            return None
        whole = _floats(tensor)
        head = Place("head", HEAD, "", places[0].in_features, places[0].out_features)
        return self._add(whole, head, "weight").to(whole.dtype)

    def check_complete(self) -> None:
        """Raise AdapterError if a change has not been made."""
        if self._left:
            module, part = min(self._left)
            raise AdapterError(
                f"the adapter changes {module} {part}".rstrip()
                + ", which the checkpoint has no weights of"
            )

    def _new_labels(self) -> Iterator[tuple[str, Weight]]:
        """A classifier that the checkpoint lacks, as that of a language model does."""
        for module, part in sorted(self._left):
            matrix = self._deltas.replaced.get(module)
            if matrix is None or not self._places.is_label_head(module):
                continue
            self._left.discard((module, part))
            yield f"{module}.weight", matrix
            if (bias := self._deltas.biases.get((module, part))) is not None:
                yield f"{module}.bias", bias

    def _changes(self) -> set[Slot]:
        deltas = self._deltas
        experts = {(module, part) for module, own in deltas.experts.items() for part in own}
        names = {*deltas.embedding, *deltas.replaced, *deltas.tokens}
        return {*deltas.linear, *experts, *((name, "") for name in names)} | set(deltas.biases)

    def _touches(self, place: Place, parameter: str) -> bool:
        deltas, slot = self._deltas, (place.module, place.part)
        if parameter == "bias":
            linear = deltas.linear.get(slot)
            return slot in deltas.biases or (linear is not None and linear.bias is not None)
        if place.kind in ("embedding", "head"):
            tables: tuple[Any, ...] = (deltas.embedding, deltas.replaced, deltas.tokens)
            return any(place.module in table for table in tables)
        return place.module in deltas.replaced or self._delta(place) is not None

    def _delta(self, place: Place) -> PartDelta | None:
        if place.kind == "expert":
            return self._deltas.experts.get(place.module, {}).get(place.part)
        if place.kind in ("linear", "labels"):
            return self._deltas.linear.get((place.module, place.part))
        return self._deltas.embedding.get(place.module)

    def _add(self, piece: torch.Tensor, place: Place, parameter: str) -> torch.Tensor:
        deltas, slot = self._deltas, (place.module, place.part)
        self._left.discard(slot)
        delta = self._delta(place)
        if parameter == "bias":
            bias = deltas.biases.get(slot, piece).float()
            return bias if delta is None or delta.bias is None else bias + delta.bias
        base = deltas.replaced.get(place.module, deltas.copies.get(place.module, piece)).float()
        if place.kind == "embedding" and place.module in deltas.tokens:
            tokens, rows = deltas.tokens[place.module]
            base = base.clone()
            base[torch.tensor(tokens)] = rows
        if delta is None:
            return base
        if place.kind == "embedding":
            return add_delta(base.T, delta).T
        if delta.bias is not None and not self._places.has_bias(place.module):
            raise AdapterError(
                f"the adapter adds a bias to {place.module} {place.part}, which has none in this "
                "model, so it cannot be merged: serve it with --enable-lora"
            )
        return add_delta(base, delta)

    def _is_same_for_head(self) -> bool:
        """Whether a tied head changes as the embedding does."""
        deltas, names = self._deltas, (self._places.embedding, HEAD)
        own, head = (deltas.embedding.get(name) for name in names)
        whole, head_whole = (deltas.replaced.get(name) for name in names)
        if whole is None or head_whole is None:
            is_same = whole is head_whole
        else:
            is_same = torch.equal(whole, head_whole)
        if not is_same or own is None or head is None:
            return is_same and own is head
        if own.magnitude is not None or head.magnitude is not None:
            return False
        return torch.allclose((own.b @ own.a).T, head.b @ head.a, rtol=1e-4, atol=1e-6)

    def _refuse_quantized(self, name: str, places: list[Place]) -> None:
        for place in places:
            if self._touches(place, "weight"):
                raise AdapterError(
                    f"the adapter changes {place.module} {place.part}, which is stored quantized "
                    f"({name}): merge it into the checkpoint in 16 bits that this one was made of, "
                    "and quantize the result"
                )


def _floats(tensor: Weight) -> torch.Tensor:
    return dequantize(tensor) if isinstance(tensor, BlockTensor) else tensor


def _rows(place: Place) -> int:
    """Rows of a part's weight in a checkpoint. An embedding has one for each token."""
    return place.in_features if place.kind == "embedding" else place.out_features
