"""LoRA adapters of the token embedding and the LM head, and matrices that replace them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from penstock.layers.context import current_adapters
from penstock.layers.embedding import VocabEmbedding
from penstock.layers.lora import (
    AdapterWeights,
    LayerSlots,
    LinearSlots,
    OwnPart,
    PartDelta,
    host_copy,
)
from penstock.layers.quantization import DenseMethod, LinearMethod
from penstock.ops.cpu import library
from penstock.ops.lora import AdapterStep, PartUpdate

HEAD = "lm_head"  # also of a model whose embedding is its head


def add_vocab_slots(
    model: nn.Module, num_slots: int, max_rank: int, dtype: torch.dtype
) -> Iterator[tuple[str, LayerSlots]]:
    """Give a model's embeddings and its head slots, by the names that adapters have for them."""
    embeddings = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, VocabEmbedding)
    ]
    for name, module in embeddings:
        if name.rpartition(".")[2] == HEAD:
            module.project_adapter = head = HeadSlots(name, module, num_slots, max_rank, dtype)
            yield name, head
        else:
            module.embed_adapter = own = EmbedSlots(name, module, num_slots, max_rank, dtype)
            yield name, own
    # The embedding is the head too. An adapter may change one and not the other.
    if len(embeddings) == 1 and getattr(model, HEAD, None) is None:
        ((name, module),) = embeddings
        build = module.build
        if name.rpartition(".")[2] != HEAD and build.generates and build.mesh.is_last_stage:
            module.project_adapter = head = HeadSlots(HEAD, module, num_slots, max_rank, dtype)
            yield HEAD, head


def _plain_method(layer: VocabEmbedding) -> LinearMethod:
    """For floats. In the C++ library, a row does not depend on its neighbours."""
    if layer.build.device.type == "cpu" and layer.method.packs and library.load() is not None:
        from penstock.layers.native import NativeMethod  # needs the library

        return NativeMethod()
    return DenseMethod()


Replacement = torch.Tensor | VocabEmbedding  # [vocab_size, hidden_size]


class _VocabSlots:
    """Slots that may hold whole matrices instead of the layer's own."""

    def __init__(self, name: str, layer: VocabEmbedding) -> None:
        self.name = name
        self.layer = layer
        self._replaced: dict[int, VocabEmbedding] = {}  # by slot

    @property
    def needs_rows(self) -> bool:
        return bool(self._replaced)

    def replacement(self, weights: AdapterWeights) -> Replacement | None:
        """The adapter's matrix in host memory: on a CPU, already in a layer."""
        matrix = weights.replaced.get(self.name)
        if matrix is None or self.layer.build.device.type != "cpu":
            return matrix
        return self._made(matrix)

    def replace(self, slot: int, own: Replacement | None) -> None:
        """Use another matrix, or the layer's own, for the rows of a slot."""
        self._replaced.pop(slot, None)
        if own is not None:
            self._replaced[slot] = own if isinstance(own, VocabEmbedding) else self._made(own)

    def replaced_rows(self, step: AdapterStep) -> Iterator[tuple[torch.Tensor, VocabEmbedding]]:
        """The rows of a step that another matrix computes, and that."""
        for slot, layer in self._replaced.items():
            rows = step.rows_of(slot)
            if len(rows):
                yield rows, layer

    def _made(self, matrix: torch.Tensor) -> VocabEmbedding:
        """A layer that computes like an unquantized one on this device."""
        layer = self.layer
        plain = replace(layer.build, linear_method=_plain_method(layer))
        own = VocabEmbedding(plain, layer.vocab_size, layer.hidden_size)
        own.load("weight", "", matrix.to(layer.build.dtype))
        return own


@dataclass(frozen=True)
class _OwnEmbedding:
    """An adapter's share of a token embedding. Every rank has all of it."""

    update: PartUpdate | None
    squared_norms: torch.Tensor | None  # [hidden_size]: of the columns of this rank's tokens
    replacement: Replacement | None


class EmbedSlots(_VocabSlots):
    """The adapters of a token embedding (`VocabEmbedding.embed_adapter`)."""

    def __init__(
        self, name: str, layer: VocabEmbedding, num_slots: int, max_rank: int, dtype: torch.dtype
    ) -> None:
        super().__init__(name, layer)
        build = layer.build
        self.dtype = dtype
        self.slots = build.ops.embedding_slots(
            num_slots, layer.vocab_size, [layer.hidden_size], max_rank, dtype, build.device
        )

    def __call__(self, token_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Change the rows of embedded [n, hidden_size], after the sum over ranks, in place."""
        step = current_adapters()
        if step is None:
            return embedded
        for rows, layer in self.replaced_rows(step):
            embedded[rows] = layer(token_ids[rows])
        return self.slots.add(token_ids, embedded, step)

    def prepare(self, weights: AdapterWeights) -> _OwnEmbedding | None:
        delta = weights.embedding.get(self.name)
        replacement = self.replacement(weights)
        if delta is None:
            return None if replacement is None else _OwnEmbedding(None, None, replacement)
        squared_norms = None
        if delta.magnitude is not None:
            squared_norms = self._squared_norms(delta, weights.replaced.get(self.name))
        device = self.layer.build.device
        a, b = (host_copy(each.T, self.dtype, device) for each in (delta.a, delta.b))
        magnitude = None if delta.magnitude is None else delta.magnitude.float().clone()
        return _OwnEmbedding(PartUpdate(a, b, magnitude), squared_norms, replacement)

    def place(self, slot: int, own: _OwnEmbedding | None) -> None:
        self.replace(slot, None if own is None else own.replacement)
        if own is None or own.update is None:
            self.slots.place(slot, ())
            return
        update = own.update
        if update.multiplier is not None:
            assert own.squared_norms is not None
            build = self.layer.build
            norms = build.tp.all_reduce(own.squared_norms.to(build.device, copy=True))
            update = replace(update, multiplier=update.multiplier.to(build.device) / norms.sqrt())
        self.slots.place(slot, [update])

    def _squared_norms(self, delta: PartDelta, replaced: torch.Tensor | None) -> torch.Tensor:
        layer = self.layer
        first, last = layer.first, min(layer.first + layer.rows, layer.vocab_size)
        if replaced is None:
            changed = layer.method.floats(layer, "")[: max(last - first, 0)].cpu()
        else:
            changed = replaced[first:last].float()
        changed = changed + delta.a[:, first:last].T.float() @ delta.b.T.float()
        return changed.square_().sum(0)


class HeadSlots(_VocabSlots):
    """The adapters of an LM head (`VocabEmbedding.project_adapter`)."""

    def __init__(
        self, name: str, layer: VocabEmbedding, num_slots: int, max_rank: int, dtype: torch.dtype
    ) -> None:
        super().__init__(name, layer)
        self.linear = LinearSlots(name, layer, num_slots, max_rank, dtype)

    def __call__(self, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Change the rows of this rank's logits [n, rows] that have an adapter, in place."""
        step = current_adapters()
        if step is None:
            return logits
        for rows, layer in self.replaced_rows(step):
            logits[rows] = layer.method.apply(layer, hidden[rows], None).to(logits.dtype)
        return self.linear.slots.add(hidden, logits, step)

    def prepare(self, weights: AdapterWeights) -> _OwnHead | None:
        delta = weights.embedding.get(self.name)
        replacement = self.replacement(weights)
        if delta is None and replacement is None:
            return None
        own = None if delta is None else self.linear.own_part("", self._padded(delta))
        return _OwnHead(own, replacement)

    def place(self, slot: int, own: _OwnHead | None) -> None:
        self.replace(slot, None if own is None else own.replacement)
        self.linear.place(slot, None if own is None or own.part is None else [own.part])

    def _padded(self, delta: PartDelta) -> PartDelta:
        """Ranks have equal numbers of tokens."""
        missing = self.layer.rows * self.layer.build.tp.size - len(delta.b)
        if not missing:
            return delta
        padded = [
            None if tensor is None else torch.cat([tensor, tensor[:1].expand(missing, *shape)])
            for tensor, shape in (
                (delta.b, delta.b.shape[1:]),
                (delta.magnitude, ()),
                (delta.bias, ()),
            )
        ]
        b, magnitude, bias = padded
        assert b is not None
        return PartDelta(delta.a, b, magnitude, bias)


@dataclass(frozen=True)
class _OwnHead:
    """This rank's share of an adapter of the LM head."""

    part: OwnPart | None
    replacement: Replacement | None
