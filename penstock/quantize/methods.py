"""The quantization methods: how a matrix is written, and its entry in the configuration.

Formats and names are those of compressed-tensors. Scales follow from rounding to nearest: the
largest number of a row or quantization group maps to the largest that can be written. Given the
second moments of the activations, smaller scales are tried too. The scale with the least error in
the layer's output is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penstock.ops.quantized import FP8, FP8_MAX, pack_nibbles

CLIP_RATIOS = tuple(1.0 - step / 40 for step in range(17))  # of the largest number: 1 to 0.6
TILE_NUMBERS = 1 << 22  # weights processed at a time


@dataclass(frozen=True)
class Method:
    """One way to write a matrix."""

    format: str  # compressed-tensors' name
    weights: Mapping[str, Any]  # their entry in config.json
    inputs: Mapping[str, Any] | None  # entry of activations; None: not quantized
    group_size: int | None  # columns per scale; None: whole rows
    limit: float  # the largest number that can be written
    round: Callable[[torch.Tensor], torch.Tensor]  # round to representable numbers
    write: Callable[[torch.Tensor], dict[str, torch.Tensor]]  # rows of numbers -> rows of tensors

    def refusal(self, weight: torch.Tensor) -> str | None:
        """Why a matrix cannot be written with this method."""
        columns = weight.shape[1]
        if self.group_size is not None and columns % self.group_size:
            return f"its {columns} columns are no multiple of the group size {self.group_size}"
        if not bool(torch.isfinite(weight).all()):
            return "it has numbers that are not finite"
        return None

    def compress(
        self, weight: torch.Tensor, moments: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """[out, in] -> the tensors that replace it, by the last part of their names.

        `moments` [in] are the mean squares of the layer's inputs, up to a factor. Beyond the
        result, memory holds a few times TILE_NUMBERS weights as floats.
        """
        columns = weight.shape[1]
        group = self.group_size or columns
        step = max(TILE_NUMBERS // columns, 1)
        whole: dict[str, torch.Tensor] = {}
        for start in range(0, len(weight), step):
            tile = weight[start : start + step]
            grouped = tile.float().view(len(tile), -1, group)
            scale = self._scales(grouped, moments, weight.dtype)
            numbers = self.round(grouped / scale[..., None].float()).view(len(tile), columns)
            for name, part in {**self.write(numbers), "weight_scale": scale}.items():
                if name not in whole:
                    whole[name] = torch.empty((len(weight), *part.shape[1:]), dtype=part.dtype)
                whole[name][start : start + step] = part
        if self.group_size is not None:  # the only format whose numbers do not imply the shape
            whole["weight_shape"] = torch.tensor(weight.shape, dtype=torch.int64)
        return whole

    def _scales(
        self, grouped: torch.Tensor, moments: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Scales [rows, groups] of [rows, groups, columns], in the `dtype` that stores them."""
        smallest = torch.finfo(dtype).tiny
        largest = (grouped.abs().amax(-1) / self.limit).clamp_min(smallest)
        if moments is None:
            return largest.to(dtype)
        importance = moments.float().view(grouped.shape[1], -1)
        best = torch.full_like(largest, torch.inf)
        chosen = largest.to(dtype)
        for ratio in CLIP_RATIOS:
            scale = (largest * ratio).clamp_min(smallest).to(dtype)
            floats = scale[..., None].float()
            missed = (self.round(grouped / floats) * floats - grouped).square_()
            error = (missed * importance).sum(-1)
            chosen = torch.where(error < best, scale, chosen)
            best = torch.minimum(error, best)
        return chosen

    def config(self, ignored: list[str]) -> dict[str, Any]:
        """The quantization_config of a checkpoint whose other linear layers are `ignored`."""
        group = {
            "targets": ["Linear"],
            "weights": dict(self.weights),
            "input_activations": None if self.inputs is None else dict(self.inputs),
            "output_activations": None,
            "format": self.format,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": self.format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ignored,
            "kv_cache_scheme": None,
        }


def method_named(name: str, group_size: int) -> Method:
    return METHODS[name](group_size)


def _arguments(bits: int, kind: str, strategy: str, **others: Any) -> dict[str, Any]:
    return {
        "num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False,
        "group_size": None, **others,
    }  # fmt: skip


def _w8a8(kind: str, dtype: torch.dtype, limit: float) -> Method:
    """Weights of 8 bits with a scale per row, activations with a scale per token."""

    def rounded(numbers: torch.Tensor) -> torch.Tensor:
        numbers = numbers if dtype.is_floating_point else numbers.round()
        return numbers.clamp(-limit, limit).to(dtype).float()

    return Method(
        format=f"{kind}-quantized",
        weights=_arguments(8, kind, "channel"),
        inputs=_arguments(8, kind, "token", dynamic=True),
        group_size=None,
        limit=limit,
        round=rounded,
        write=lambda numbers: {"weight": numbers.to(dtype)},
    )


def _w4a16(group_size: int) -> Method:
    return Method(
        format="pack-quantized",
        weights=_arguments(4, "int", "group", group_size=group_size),
        inputs=None,
        group_size=group_size,
        limit=7.0,
        round=lambda numbers: numbers.round().clamp_(-8, 7),
        write=_pack,
    )


def _pack(numbers: torch.Tensor) -> dict[str, torch.Tensor]:
    """Pack eight numbers, each plus 8, into an int32, the first in the lowest bits."""
    packed = pack_nibbles((numbers + 8).to(torch.uint8)).contiguous()
    return {"weight_packed": packed.view(torch.int32)}


METHODS: Mapping[str, Callable[[int], Method]] = {
    "fp8": lambda group_size: _w8a8("float", FP8, FP8_MAX),
    "int8": lambda group_size: _w8a8("int", torch.int8, 127.0),
    "w4a16": _w4a16,
}
