"""LoRA: what adapters add to the output of a linear layer, for the rows that use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class AdapterStep:
    """Which rows of a step use which adapter slot. On the device of the step."""

    slots: torch.Tensor  # [num_rows] int32: of each row; -1: none
    rows: torch.Tensor  # int32: the rows that have a slot, ordered by slot; then undefined
    starts: torch.Tensor  # [num_slots + 1] int32: slot i has rows[starts[i] : starts[i + 1]]

    @cached_property
    def host_starts(self) -> list[int]:
        """The host waits for a device once: not for graphs."""
        return list(self.starts.tolist())

    def rows_of(self, slot: int) -> torch.Tensor:
        """The rows that use a slot: [n] int64. See `host_starts`."""
        return self.rows[self.host_starts[slot] : self.host_starts[slot + 1]].long()

    def only(self, num_rows: int) -> AdapterStep:
        """A step of so many rows that all use slot 0, on the same device."""
        return adapter_step(np.zeros(num_rows, dtype=np.int64), 1)

    def take(self, rows: torch.Tensor | slice) -> AdapterStep:
        """The step of these rows alone."""
        return group_rows(self.slots[rows], len(self.starts) - 1)


def adapter_step(slots: npt.NDArray[np.int64], num_slots: int) -> AdapterStep:
    """Group rows by their adapter slots [num_rows], on the host."""
    order = np.argsort(slots, kind="stable")
    counts = np.bincount(slots + 1, minlength=num_slots + 1)  # those without a slot first
    starts = np.cumsum(counts) - counts[0]
    return AdapterStep(
        slots=torch.from_numpy(slots.astype(np.int32)),
        rows=torch.from_numpy(order[counts[0] :].astype(np.int32)),
        starts=torch.from_numpy(starts.astype(np.int32)),
    )


@dataclass(frozen=True)
class PartUpdate:
    """What an adapter changes in one part of a layer: `multiplier * (y + b^T a x) + shift`."""

    a: torch.Tensor  # [rank, in_features]
    b: torch.Tensor  # [rank, out_features of the part], contiguous
    multiplier: torch.Tensor | None = None  # [out_features of the part] float32: DoRA's
    shift: torch.Tensor | None = None  # [out_features of the part] float32


Update = Sequence[PartUpdate | None]  # of each part of a layer, in order


class LoraSlots:
    """The adapters of one linear layer, by slot: the torch reference.

    A slot keeps the tensors that it was given. Devices with memory of their own copy them.
    """

    def __init__(
        self,
        num_slots: int,
        in_features: int,
        part_rows: Sequence[int],  # output features of each part
        max_rank: int,
        dtype: torch.dtype,  # of `a` and `b`
        device: torch.device,
    ) -> None:
        self.num_slots = num_slots
        self.in_features = in_features
        self.part_rows = list(part_rows)
        self.updates: list[Update] = [()] * num_slots

    def join(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None) -> None:
        """May move the layer's dense matrix to where it is multiplied together with the slots'."""

    def place(self, slot: int, update: Update) -> None:
        """Put an adapter's share of this layer into a slot. An empty update changes nothing."""
        self.updates[slot] = update

    def run(
        self, x: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor], step: AdapterStep
    ) -> torch.Tensor:
        """`product(x)`, changed as `add` does."""
        return self.add(x, product(x), step)

    def add(self, x: torch.Tensor, output: torch.Tensor, step: AdapterStep) -> torch.Tensor:
        """Change the rows of output [n, out] that have an adapter, in place. x is [n, in]."""
        for slot, update in enumerate(self.updates):
            rows = step.rows_of(slot)
            if update and len(rows):
                output[rows] = self._changed(x[rows], output[rows], update)
        return output

    def _changed(self, x: torch.Tensor, output: torch.Tensor, update: Update) -> torch.Tensor:
        columns = torch.split(output, self.part_rows, dim=1)
        return torch.cat(
            [
                own if part is None else _changed_part(x, own, part)
                for own, part in zip(columns, update, strict=True)
            ],
            dim=1,
        )


def _changed_part(x: torch.Tensor, output: torch.Tensor, part: PartUpdate) -> torch.Tensor:
    """In float32 whatever the types, as faster implementations accumulate."""
    changed = output.float() + x.float() @ part.a.float().T @ part.b.float()
    return _finish(changed, part).to(output.dtype)


def _finish(changed: torch.Tensor, part: PartUpdate) -> torch.Tensor:
    if part.multiplier is not None:
        changed *= part.multiplier
    if part.shift is not None:
        changed += part.shift
    return changed


class EmbeddingSlots(LoraSlots):
    """The adapters of a token embedding, by slot. Their `a` is [num_tokens, rank]."""

    def add(self, x: torch.Tensor, output: torch.Tensor, step: AdapterStep) -> torch.Tensor:
        """Change the rows of output [n, hidden] that have an adapter. x [n] are token ids."""
        for slot, update in enumerate(self.updates):
            rows = step.rows_of(slot)
            for part in update if len(rows) else ():
                assert part is not None, "an embedding has one part"
                looked_up = part.a[x[rows].long()].float()  # [rows, rank]
                changed = output[rows].float()
                # One rank after the other: a row does not depend on its neighbours.
                for column, vector in zip(looked_up.T, part.b.float(), strict=True):
                    changed += column[:, None] * vector
                output[rows] = _finish(changed, part).to(output.dtype)
        return output


# The ops. Those of an embedding have tokens for the input features.
lora_slots = LoraSlots
embedding_slots = EmbeddingSlots


def group_rows(slots: torch.Tensor, num_slots: int) -> AdapterStep:
    """The step of rows with these slots: [num_rows] int32, -1: none."""
    return adapter_step(slots.long().numpy(), num_slots)
