"""The interface between a model and its callers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from penstock.layers.attention import CachedLayer
from penstock.layers.build import Build
from penstock.ops.blocks import Weight
from penstock.protocol.kv import KVCacheSpec
from penstock.protocol.pooling import PoolingType


@dataclass(frozen=True)
class Hidden:
    """What a forward pass gives."""

    states: torch.Tensor  # [num_tokens, hidden_size], after the last norm
    aux: tuple[torch.Tensor, ...] = ()  # hidden states of earlier layers, for drafters


@dataclass(frozen=True)
class WeightTable:
    """How checkpoint names differ from the model's own, beyond what its layers' parts say."""

    ignored: tuple[str, ...] = ()  # regular expressions of tensors that need not be loaded
    renamed: dict[str, str] = field(default_factory=dict)  # regular expression -> replacement


class Classifier(Protocol):
    """What follows pooling in a model that has labels, in float32."""

    num_labels: int
    pooling: PoolingType  # ALL: every token has labels

    def __call__(self, pooled: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> logits [n, num_labels]."""


class Model(nn.Module):
    """All that assembly (`models/assembly.py`), executor and runner ask of a model."""

    weights: WeightTable  # assembly
    vocab_size: int  # executor
    hidden_size: int  # executor: of what `forward` gives
    pooling: ClassVar[PoolingType] = "LAST"  # of embeddings, where no file says otherwise
    can_capture: ClassVar[bool] = True  # executor: whether a GPU may capture its steps in graphs

    def __init__(self) -> None:
        super().__init__()
        self.classifier: Classifier | None = None  # of a model that is to classify

    @classmethod
    def create(cls, build: Build, raw: Mapping[str, Any]) -> Model:
        """The model that a config.json describes, its weights still to be loaded."""
        raise NotImplementedError

    def convert(self, tensors: Iterable[tuple[str, Weight]]) -> Iterable[tuple[str, Weight]]:
        """Assembly: a checkpoint's tensors, as `load_weights` takes them."""
        return tensors

    def check(self) -> None:
        """Assembly, once weights are loaded: refuse what can only be seen then."""

    def kv_specs(self, dtype: str) -> dict[str, KVCacheSpec]:
        """Executor: what each layer keeps in the KV cache, by the layer's name, in order."""
        layers = [module for module in self.modules() if isinstance(module, CachedLayer)]
        specs = {layer.name: layer.kv_spec(dtype) for layer in layers}
        return {name: spec for name, spec in specs.items() if spec is not None}

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Runner: token ids [n] -> [n, hidden_size]."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> Hidden:
        """Runner: embedded tokens at their positions, through all layers."""
        raise NotImplementedError

    def logits(
        self, hidden: Hidden, rows: torch.Tensor | slice, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Runner: logits [len(rows), vocab_size] of these rows, in any type; in `out` if given."""
        raise NotImplementedError
