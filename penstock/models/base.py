"""The interface of a model to assembly, executor and runner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from penstock.distributed.stage_link import States
from penstock.layers.attention import CachedLayer
from penstock.layers.build import Build
from penstock.ops.blocks import Weight
from penstock.ops.lora import AdapterStep
from penstock.ops.sharded_sampling import VocabShard
from penstock.protocol.kv import KVCacheSpec
from penstock.protocol.pooling import DualInputs, PoolingType


@dataclass(frozen=True)
class Hidden:
    """The result of a forward pass."""

    states: torch.Tensor  # [num_tokens, hidden_size], after the last norm
    # Hidden states of earlier layers, for drafters. On a pipeline stage before the last, those
    # collected so far, in the layers' order.
    aux: tuple[torch.Tensor, ...] = ()
    adapters: AdapterStep | None = None  # of the rows; None: no row uses one
    # On a pipeline stage before the last, `states` are the last layer's output without the norm,
    # and this is still to be added to them.
    residual: torch.Tensor | None = None

    @property
    def handed(self) -> States:
        """What the next pipeline stage gets."""
        assert self.residual is not None, "the last stage hands nothing on"
        return self.states, self.residual, *self.aux


@dataclass(frozen=True)
class WeightTable:
    """How checkpoint names differ from the model's, beyond what the layers' parts define."""

    ignored: tuple[str, ...] = ()  # regular expressions of tensors that are not loaded
    renamed: dict[str, str] = field(default_factory=dict)  # regular expression -> replacement
    elsewhere: tuple[str, ...] = ()  # the model's names, not the checkpoint's: of other ranks

    def renaming(self, renamed: Mapping[str, str]) -> WeightTable:
        """This table with further replacements. Earlier ones are applied first."""
        return replace(self, renamed={**self.renamed, **renamed})


@dataclass(frozen=True)
class MtpLayout:
    """Where a checkpoint has multi-token-prediction (MTP) layers, and how their parts join.

    ``{depth}`` stands for the number of an MTP layer, from 0, and ``{index}`` for the same counted
    on from the model's layers. Layers share a part without either.
    """

    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str  # after the layer
    hidden_first: bool = False  # in the projection's input, before the embedding
    passes_normed: bool = False  # the next row takes the hidden state after `norm`
    num_layers: int = 0  # if config.json does not say


class Classifier(Protocol):
    """What follows pooling in a model with labels, in float32."""

    num_labels: int
    pooling: PoolingType  # ALL: every token has labels

    def __call__(self, pooled: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> logits [n, num_labels]."""


class Model(nn.Module):
    """What assembly (`models/assembly.py`), executor and runner require of a model."""

    weights: WeightTable  # assembly
    vocab_size: int  # executor
    hidden_size: int  # executor: of the output of `forward`
    media_width: int = 0  # executor: of a row of media (`models/vision.py`); 0: it takes none
    pooling: ClassVar[PoolingType] = "LAST"  # of embeddings, if no file says otherwise
    dual: DualInputs | None = None  # of a dual encoder (`models/dual_encoder.py`)
    can_capture: ClassVar[bool] = True  # executor: whether a GPU may capture its steps
    gives_aux: ClassVar[bool] = False  # whether `forward` follows `aux_layers`
    has_stages: ClassVar[bool] = False  # whether it can build the layers of one pipeline stage
    mtp_layout: ClassVar[MtpLayout | None] = None  # if checkpoints may have such layers

    def __init__(self) -> None:
        super().__init__()
        self.classifier: Classifier | None = None  # of a classification model
        self.aux_layers: tuple[int, ...] = ()  # whose inputs `Hidden.aux` has, for drafters

    @classmethod
    def create(cls, build: Build, raw: Mapping[str, Any]) -> Model:
        """The model that a config.json describes, without weights."""
        raise NotImplementedError

    def convert(self, tensors: Iterable[tuple[str, Weight]]) -> Iterable[tuple[str, Weight]]:
        """Assembly: convert a checkpoint's tensors to those that `load_weights` takes."""
        return tensors

    def check(self) -> None:
        """Assembly: raise for problems that show only after the weights are loaded."""

    def kv_specs(self, dtype: str) -> dict[str, KVCacheSpec]:
        """Executor: what each layer keeps in the KV cache, by layer name, in order."""
        layers = [module for module in self.modules() if isinstance(module, CachedLayer)]
        specs = {layer.name: layer.kv_spec(dtype) for layer in layers}
        return {name: spec for name, spec in specs.items() if spec is not None}

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Runner: token ids [n] -> [n, hidden_size]."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> Hidden:
        """Runner: run embedded tokens at their positions through all layers."""
        raise NotImplementedError

    @property
    def vocab_shard(self) -> VocabShard | None:
        """Runner: which logits are this rank's. None: every rank has all of them."""
        return None

    def resume(self, handed: States, positions: torch.Tensor) -> Hidden:
        """Runner: run the states of an earlier pipeline stage through this stage's layers."""
        raise NotImplementedError

    @property
    def num_handed(self) -> int:
        """Executor: how many states an earlier pipeline stage hands on."""
        return 0

    def logits(
        self, hidden: Hidden, rows: torch.Tensor | slice, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Runner: logits [len(rows), vocab_size] of these rows, in any type; in `out` if given.

        If `out` has the width of `vocab_shard`, it gets the logits of this rank's tokens alone.
        """
        raise NotImplementedError
