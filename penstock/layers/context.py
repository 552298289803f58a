"""The forward context: what a step's layers need beyond their inputs. The one global there is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from penstock.ops.attention import AttentionMetadata
from penstock.ops.recurrent import StateStep, state_step


@dataclass(frozen=True)
class ForwardContext:
    caches: Mapping[str, torch.Tensor]  # a layer's KV cache, by the layer's name
    attention: Mapping[str, AttentionMetadata]  # by the layer's name
    query_starts: torch.Tensor  # [num_requests + 1] int32
    token_slots: torch.Tensor  # [num_tokens] int64: the request table's row of each token
    # A recurrent layer's states by its name, part by part: [num_blocks, *shape].
    states: Mapping[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    state_block_sizes: Mapping[str, int] = field(default_factory=dict)  # of the same layers
    # [max_num_seqs] int32, by slot: the position from which on a request's tokens are those of the
    # second text of a pair. None where nothing is pooled.
    second_segments: torch.Tensor | None = None
    _state_steps: dict[tuple[int, int], StateStep] = field(default_factory=dict)

    def state_step(self, name: str) -> StateStep:
        """Where the step's states of a recurrent layer lie: found once for a group's layers."""
        metadata, block_size = self.attention[name], self.state_block_sizes[name]
        key = (id(metadata), block_size)
        if key not in self._state_steps:
            self._state_steps[key] = state_step(metadata, block_size)
        return self._state_steps[key]


_current: ForwardContext | None = None


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Make `context` the current one while a model's forward pass runs."""
    global _current
    outer, _current = _current, context
    try:
        yield
    finally:
        _current = outer


def current_context() -> ForwardContext:
    assert _current is not None, "a model's forward pass runs inside forward_context()"
    return _current
