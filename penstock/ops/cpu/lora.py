"""LoRA in the C++ library, with one order of summation: a row has the same bits in any batch."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from penstock.ops import lora
from penstock.ops.cpu import library
from penstock.ops.cpu.dtypes import FLOAT_TYPES
from penstock.ops.lora import AdapterStep, PartUpdate, Update

_library = library.loaded()
_add_lora = _library.penstock_add_lora


class NativeLoraSlots(lora.LoraSlots):
    """The slots of a linear layer, as the library takes them. It reads the tensors in place."""

    def __init__(self, num_slots: int, in_features: int, *sizes: Any) -> None:
        super().__init__(num_slots, in_features, *sizes)
        self._updates = (library.LoraUpdate * num_slots)()
        self._parts: list[ctypes.Array[library.LoraPart] | None] = [None] * num_slots
        self.struct = library.LoraSlotsStruct(
            ctypes.addressof(self._updates), num_slots, in_features
        )
        self._pointer = ctypes.addressof(self.struct)

    def place(self, slot: int, update: Update) -> None:
        super().place(slot, update)  # keeps the tensors alive
        parts, first = [], 0
        for rows, part in zip(self.part_rows, update or [None] * len(self.part_rows), strict=True):
            if part is not None:
                parts.append(self._part(part, first, rows))
            first += rows
        self._parts[slot] = array = (library.LoraPart * len(parts))(*parts)
        entry = self._updates[slot]
        entry.parts, entry.num_parts = ctypes.addressof(array), len(parts)
        entry.rank = sum(part.rank for part in parts)

    def add(self, x: torch.Tensor, output: torch.Tensor, step: AdapterStep) -> torch.Tensor:
        """As the reference. Other types and layouts than contiguous rows of float32 go there."""
        are_floats = x.dtype == output.dtype == torch.float32
        if not (are_floats and x.stride(1) == output.stride(1) == 1):
            return super().add(x, output, step)
        rows = len(step.slots)
        if x.shape != (rows, self.in_features) or output.shape != (rows, sum(self.part_rows)):
            raise ValueError(f"{rows} rows, but x {list(x.shape)} and output {list(output.shape)}")
        struct = step_of(step)
        _add_lora(
            self._pointer, ctypes.addressof(struct), x.data_ptr(), x.stride(0),
            output.data_ptr(), output.stride(0),
        )  # fmt: skip
        return output

    def _part(self, part: PartUpdate, first_column: int, columns: int) -> library.LoraPart:
        rank = len(part.a)
        for matrix, width in ((part.a, self.in_features), (part.b, columns)):
            assert matrix.shape == (rank, width), f"{list(matrix.shape)}, not [{rank}, {width}]"
            assert matrix.dtype == part.a.dtype, "both matrices have one type"
            assert matrix.is_contiguous(), "a matrix is read as it lies"
        pointers = []
        for vector in (part.multiplier, part.shift):
            if vector is not None:
                assert vector.shape == (columns,), f"{list(vector.shape)}, not [{columns}]"
                assert vector.dtype == torch.float32, f"a vector in {vector.dtype}"
                assert vector.is_contiguous(), "a vector is read as it lies"
            pointers.append(None if vector is None else vector.data_ptr())
        return library.LoraPart(
            part.a.data_ptr(), part.b.data_ptr(), FLOAT_TYPES[part.a.dtype], rank,
            first_column, columns, *pointers,
        )  # fmt: skip


lora_slots = NativeLoraSlots  # the op


def step_of(step: AdapterStep) -> library.AdapterStepStruct:
    """A step's adapters as the library takes them. Valid while the tensors live."""
    for tensor in (step.rows, step.starts):
        assert tensor.dtype == torch.int32, f"{tensor.dtype} rows"
        assert tensor.is_contiguous(), "rows are read as they lie"
    return library.AdapterStepStruct(step.rows.data_ptr(), step.starts.data_ptr(), len(step.slots))
