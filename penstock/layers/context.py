"""The forward context: what a step's layers need beyond their inputs. The only global state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from penstock.ops.attention import AttentionMetadata, SpanRows
from penstock.ops.lora import AdapterStep
from penstock.ops.recurrent import StateStep, state_step


@dataclass(frozen=True)
class MediaRows:
    """Rows of a step whose embeddings come from media."""

    rows: torch.Tensor  # [n] int64
    values: torch.Tensor  # [n, media_width]


@dataclass(frozen=True)
class ForwardContext:
    caches: Mapping[str, torch.Tensor]  # KV cache of each layer, by layer name
    attention: Mapping[str, AttentionMetadata]  # by layer name
    query_starts: torch.Tensor  # [num_requests + 1] int32
    token_slots: torch.Tensor  # [num_tokens] int64: slot of each token's request; -1 for padding
    # States of recurrent layers, by layer name, part by part: [num_blocks, *shape].
    states: Mapping[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    state_block_sizes: Mapping[str, int] = field(default_factory=dict)  # of the same layers
    # Inputs of their drafts, part by part: [num_draft_rows, size].
    draft_inputs: Mapping[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    # [max_num_seqs] int32, by slot: the position where the second text of a pair begins. None if
    # nothing is pooled.
    second_segments: torch.Tensor | None = None
    adapters: AdapterStep | None = None  # None: no row uses an adapter
    media: MediaRows | None = None  # None: no row is an image's or a video's
    spans: tuple[SpanRows, ...] = ()  # rows that also see tokens after them
    _state_steps: dict[tuple[int, int], StateStep] = field(default_factory=dict)

    def state_step(self, name: str) -> StateStep:
        """Where a recurrent layer's states of this step are. Computed once per group."""
        metadata, block_size = self.attention[name], self.state_block_sizes[name]
        key = (id(metadata), block_size)
        if key not in self._state_steps:
            self._state_steps[key] = state_step(metadata, block_size)
        return self._state_steps[key]


_current: ForwardContext | None = None


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Make `context` current while a model's forward pass runs."""
    global _current
    outer, _current = _current, context
    try:
        yield
    finally:
        _current = outer


@contextmanager
def adapter_context(adapters: AdapterStep) -> Iterator[None]:
    """For layers after the forward pass, which attend to nothing."""
    nothing = torch.empty(0)
    with forward_context(ForwardContext({}, {}, nothing, nothing, adapters=adapters)):
        yield


def current_adapters() -> AdapterStep | None:
    """Which rows have adapters; None if none has one, or if this is no part of a step."""
    return None if _current is None else _current.adapters


def current_context() -> ForwardContext:
    assert _current is not None, "a model's forward pass runs inside forward_context()"
    return _current
