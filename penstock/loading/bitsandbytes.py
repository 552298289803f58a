"""Converts bitsandbytes' 4-bit matrices, which are stored flat, to matrices with rows.

That library stores ``layer.weight`` as one column of bytes, two numbers per byte with the first in
the high bits. Each quantization block of the *flattened* matrix has a scale (absmax). Beside them
are the table that the numbers index, and JSON in a tensor of bytes. Scales may be quantized
themselves, to indexes into a second table. This module makes what the format's scheme takes, which
can be fused and sharded like any other:

- ``layer.weight`` [out, in / 2] uint8, the first number in the low bits
- ``layer.weight_scale`` [out, in / group] float32. A quantization group is a quantization block.
  If blocks span the ends of rows, it is a common divisor of block and row.
- ``layer.quant_map`` [16] float32
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from penstock.loading.wanted import IsWanted, always
from penstock.ops.blocks import BlockTensor, Weight
from penstock.protocol.errors import ModelError

if TYPE_CHECKING:
    from penstock.loading.checkpoint import Checkpoint

_STATE = re.compile(r"(.*)\.weight\.quant_state\.bitsandbytes__\w+")
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_MADE = ("weight", "weight_scale", "quant_map")
_LARGEST_FLOAT = torch.finfo(torch.float32).max


def has_flat_matrices(names: list[str]) -> bool:
    """Whether a checkpoint has 4-bit matrices of bitsandbytes."""
    return any(_STATE.fullmatch(name) for name in names)


class BitsAndBytesCheckpoint:
    """A checkpoint whose 4-bit matrices are converted to rows and columns."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        names = set(checkpoint.names())
        # By tensor name: its layer, and its name in `_matrix`.
        self._parts: dict[str, tuple[str, str]] = {}
        self._num_parts: dict[str, int] = {}  # by layer
        for name in checkpoint.names():
            if match := _STATE.fullmatch(name):
                layer = match[1]
                own = {f"{layer}.weight.{part}": (layer, part) for part in _PARTS}
                own |= {f"{layer}.weight": (layer, "weight"), name: (layer, "state")}
                found = {part: place for part, place in own.items() if part in names}
                self._parts |= found
                self._num_parts[layer] = len(found)

    def names(self) -> list[str]:
        kept = [name for name in self._checkpoint.names() if name not in self._parts]
        return [*kept, *(f"{layer}.{part}" for layer in self._num_parts for part in _MADE)]

    def tensors(self, is_wanted: IsWanted = always) -> Iterator[tuple[str, Weight]]:
        """Yield all wanted tensors.

        Those of one matrix wait for each other: they may be in different files.
        """
        waiting: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in self._checkpoint.tensors(is_wanted):
            if name not in self._parts or isinstance(tensor, BlockTensor):
                yield name, tensor
                continue
            layer, part = self._parts[name]
            parts = waiting.setdefault(layer, {})
            parts[part] = tensor
            if len(parts) == self._num_parts[layer]:
                del waiting[layer]
                for made, matrix in _matrix(layer, parts).items():
                    yield f"{layer}.{made}", matrix


def _matrix(layer: str, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert one layer's tensors to those of `_MADE`. Raises ModelError if they do not match."""
    state = _State(layer, parts)
    rows, columns = state.shape
    data = state.take("weight")
    data = data.contiguous().view(-1).view(torch.uint8)  # any type may store the bytes
    if 2 * len(data) != rows * columns or columns % 2:
        raise ModelError(
            f"{layer}.weight has {len(data)} bytes, but two numbers in each do not make the "
            f"{rows} x {columns} that its quant_state declares, in rows of whole bytes"
        )
    table = state.take("quant_map", torch.float32, 16)
    swapped = ((data << 4) | (data >> 4)).view(rows, columns // 2)
    group = math.gcd(columns, state.blocksize)
    num_groups = rows * columns // group
    scales = _scales(state, -(-rows * columns // state.blocksize))
    if group != state.blocksize:  # some quantization blocks span two rows
        scales = scales[torch.arange(num_groups) * group // state.blocksize]
    scales = scales.view(rows, columns // group)
    return {"weight": swapped, "weight_scale": scales, "quant_map": table}


def _scales(state: _State, count: int) -> torch.Tensor:
    """The scales of all quantization blocks: [count] float32."""
    if not state.is_nested:
        return state.take("absmax", torch.float32, count)
    places = state.take("absmax", torch.uint8, count)
    size = min(state.positive("nested_blocksize"), count)  # a larger one makes no difference
    of_blocks = state.take("nested_absmax", torch.float32, -(-count // size))
    values = state.take("nested_quant_map", torch.float32, 256)[places.int()]
    return values * of_blocks.repeat_interleave(size)[:count] + state.number("nested_offset")


class _State:
    """A layer's JSON and its tensors. Each is checked when it is read."""

    def __init__(self, layer: str, parts: dict[str, torch.Tensor]) -> None:
        self._layer = layer
        self._parts = parts
        data = self.take("state", torch.uint8).reshape(-1)
        try:
            raw: Any = json.loads(bytes(data.tolist()))
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{layer}.weight.quant_state is not JSON: {error}") from error
        if not isinstance(raw, dict):
            raise ModelError(f"{layer}.weight.quant_state must be an object, got {raw!r:.80}")
        self._raw = raw
        self.blocksize = self.positive("blocksize")
        self.is_nested = "nested_blocksize" in raw
        shape: Any = raw.get("shape")
        is_shape = isinstance(shape, list) and all(type(n) is int and n > 0 for n in shape)
        if not is_shape or len(shape) != 2:
            raise ModelError(
                f"{layer}.weight.quant_state has shape {shape!r:.80}; supported: matrices"
            )
        self.shape: tuple[int, int] = (shape[0], shape[1])

    def positive(self, key: str) -> int:
        value = self._raw.get(key)
        if type(value) is not int or not 1 <= value < 2**31:
            raise ModelError(
                f"{self._layer}.weight.quant_state's {key} must be from 1 to 2^31 - 1, "
                f"got {value!r:.80}"
            )
        return value

    def number(self, key: str) -> float:
        value = self._raw.get(key)
        if not isinstance(value, (int, float)) or not abs(value) <= _LARGEST_FLOAT:
            raise ModelError(
                f"{self._layer}.weight.quant_state's {key} must be a number, got {value!r:.80}"
            )
        return float(value)

    def take(
        self, part: str, dtype: torch.dtype | None = None, count: int | None = None
    ) -> torch.Tensor:
        """A tensor of this type and size."""
        name = f"{self._layer}.weight" if part == "weight" else f"{self._layer}.weight.{part}"
        tensor = self._parts.get(part)
        if tensor is None:
            raise ModelError(f"the checkpoint lacks {name}, which holds the layer's scales")
        if dtype is not None and tensor.dtype != dtype:
            raise ModelError(
                f"{name} is stored as {str(tensor.dtype).removeprefix('torch.')}; supported: "
                f"{str(dtype).removeprefix('torch.')}"
            )
        if count is not None and tensor.numel() != count:
            raise ModelError(f"{name} has {tensor.numel()} numbers, but the layer needs {count}")
        return tensor.reshape(-1) if count is not None else tensor
