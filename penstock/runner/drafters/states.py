"""DraftStates: the states of a draft model's recurrent layers.

A state cannot be rolled back when a draft is rejected. So a request has two: one after its known
tokens, and one after the drafts behind them, which begins as a copy. What drafts leave is dropped,
also if they hold: the next pass reads them again, with the token that follows.

The states lie outside of the KV cache, by slot. So a draft model reads a request's tokens from the
first one, also if they are cached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from penstock.ops.attention import AttentionMetadata
from penstock.protocol.kv import RecurrentSpec
from penstock.runner.kv_memory import make_states


class DraftStates:
    def __init__(
        self,
        specs: Mapping[str, RecurrentSpec],
        num_slots: int,
        max_positions: int,
        device: torch.device,
    ) -> None:
        self.num_slots = num_slots
        # The first one is written for padding, and nobody reads it.
        num_states = 1 + 2 * num_slots
        self.nbytes = num_states * sum(spec.block_bytes(1) for spec in specs.values())
        self.layers = {name: make_states(spec, num_states, device) for name, spec in specs.items()}
        # A block table has one block, which holds the state after any number of tokens.
        self.block_sizes = dict.fromkeys(specs, 1 << max_positions.bit_length())
        self._first = 1  # state of slot 0

    def use_known(self) -> None:
        """Passes read and write the states after known tokens."""
        self._first = 1

    def begin_drafts(self, slots: torch.Tensor) -> None:
        """From now on, passes leave those alone, and read and write copies for drafts."""
        self.use_known()
        known = self._places(slots)
        self._first = 1 + self.num_slots
        drafted = self._places(slots)
        for states in self.layers.values():
            for part in states:
                part[drafted] = part[known]

    def metadata(
        self, metadata: AttentionMetadata, slots: torch.Tensor
    ) -> dict[str, AttentionMetadata]:
        """By layer, for the requests in these slots. `metadata`: of other layers in the pass."""
        table = self._places(slots)[:, None].int()
        return dict.fromkeys(self.layers, replace(metadata, block_table=table))

    def _places(self, slots: torch.Tensor) -> torch.Tensor:
        """Slot -1 leaves no state."""
        return torch.where(slots < 0, 0, slots + self._first)
