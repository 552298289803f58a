"""Schemes of 4 and 8 bits with quantization groups: GPTQ, AWQ, and pack-quantized."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from penstock.layers.loadable import Expected
from penstock.layers.quantization import Shard
from penstock.layers.quantized.schemes import Scheme, Tensors, check_type, scales_of
from penstock.layers.quantized.weights import QuantizedWeight, W4Weight
from penstock.ops.quantized import pack_nibbles, unpack_nibbles
from penstock.protocol.errors import ModelError

_WORD = 32  # bits
# AWQ words hold columns 0, 2, 4, 6, 1, 3, 5, 7 from the low bits up. This is the index of each
# column.
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
_SMALL_GROUP = 32


@dataclass(frozen=True)
class _Grouped(Scheme):
    bits: int
    group_size: int  # columns that share a scale; -1: a whole row

    def __post_init__(self) -> None:
        if type(self.bits) is not int:
            raise ModelError(
                f"config.json: quantization_config's bits must be a whole number, "
                f"got {self.bits!r:.80}"
            )
        size = self.group_size
        if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
            raise ModelError(
                f"config.json: quantization_config's group_size must be -1 or at least 1, "
                f"got {size!r:.80}"
            )

    def check(self, shape: tuple[int, int]) -> tuple[int, int, int]:
        """Rows, columns and quantization groups.

        Raises ModelError if they do not fill whole words.
        """
        rows, columns = shape
        group = columns if self.group_size == -1 else self.group_size
        if columns % group or columns * self.bits % _WORD or rows * self.bits % _WORD:
            raise ModelError(
                f"a matrix of {rows} x {columns} cannot have {self.bits}-bit weights in groups of "
                f"{group}: the groups, or words of {_WORD} bits, do not divide it"
            )
        return rows, columns, columns // group


@dataclass(frozen=True)
class GptqScheme(_Grouped):
    """Numbers packed along the input, zeros along the output. g_idx gives each column's group."""

    act_order: bool = False
    zero_offset: int = 1  # the first version of the format stores zeros minus one

    @property
    def label(self) -> str:
        order = ", act-order" if self.act_order else ""
        return f"GPTQ {self.bits} bits by {self.group_size}{order}"

    @property
    def optional(self) -> frozenset[str]:
        needs_order = self.act_order and self.group_size != -1
        return frozenset() if needs_order else frozenset({"g_idx"})

    marks = frozenset({"qweight"})

    def expected(self, shape: tuple[int, int]) -> dict[str, Expected]:
        rows, columns, groups = self.check(shape)
        per_word = _WORD // self.bits
        # In activation order, columns may belong to any quantization group: all ranks keep all
        # groups.
        cut = None if self.act_order else 0
        return {
            "qweight": Expected((columns // per_word, rows), rows=1, columns=0),
            "qzeros": Expected((groups, rows // per_word), rows=1, columns=cut),
            "scales": Expected((groups, rows), rows=1, columns=cut),
            "g_idx": Expected((columns,), rows=None, columns=0),
        }

    def convert(self, tensors: Tensors, shard: Shard) -> QuantizedWeight:
        _check_words(tensors, "qweight", "qzeros")
        words = tensors["qweight"].contiguous()  # [in / per_word, out]
        packed = words.view(torch.uint8).view(*words.shape, 4).transpose(0, 1).flatten(1)
        zeros = self._zeros(tensors["qzeros"])
        scales = scales_of(tensors, "scales").t().contiguous()
        weight = _weight(packed, scales, zeros, self.bits)
        if "g_idx" not in tensors or self.group_size == -1:
            return weight
        groups = _groups(tensors, "g_idx")
        in_order = _in_order(groups, self.group_size, shard)
        is_set = bool(groups.any())  # some writers leave it zero if columns are in order
        if self.act_order:
            return order_columns(weight, groups if is_set else in_order, self.group_size)
        if is_set and not torch.equal(groups, in_order):
            raise ModelError(
                "g_idx has columns in activation order, but quantization_config has "
                "desc_act=false: set desc_act to true in config.json"
            )
        return weight

    def _zeros(self, words: torch.Tensor) -> torch.Tensor:
        """[groups, out / per_word] int32 -> [out, groups] uint8."""
        # Writers subtract from whole words, with borrows. Adding to whole words undoes it.
        ones = sum(self.zero_offset << shift for shift in range(0, _WORD, self.bits))
        whole = ((words.long() + ones) & 0xFFFFFFFF).to(torch.uint32)
        numbers = whole.contiguous().view(torch.uint8)
        if self.bits == 4:
            numbers = unpack_nibbles(numbers)
        return numbers.t().contiguous()


@dataclass(frozen=True)
class AwqScheme(_Grouped):
    """Numbers and zeros packed along the output, in AWQ's own order."""

    has_zeros: bool = True

    @property
    def label(self) -> str:
        return f"AWQ {self.bits} bits by {self.group_size}"

    @property
    def optional(self) -> frozenset[str]:
        return frozenset() if self.has_zeros else frozenset({"qzeros"})

    marks = frozenset({"qweight"})

    def expected(self, shape: tuple[int, int]) -> dict[str, Expected]:
        rows, columns, groups = self.check(shape)
        per_word = _WORD // self.bits
        return {
            "qweight": Expected((columns, rows // per_word), rows=1, columns=0),
            "qzeros": Expected((groups, rows // per_word), rows=1, columns=0),
            "scales": Expected((groups, rows), rows=1, columns=0),
        }

    def convert(self, tensors: Tensors, shard: Shard) -> QuantizedWeight:
        _check_words(tensors, "qweight", "qzeros")
        packed = pack_nibbles(_from_awq(tensors["qweight"]))
        zeros = _from_awq(tensors["qzeros"]) if self.has_zeros else None
        scales = scales_of(tensors, "scales").t().contiguous()
        return _weight(packed, scales, zeros, self.bits)


def _from_awq(words: torch.Tensor) -> torch.Tensor:
    """[n, out / 8] int32 -> [out, n] uint8."""
    stored = unpack_nibbles(words.contiguous().view(torch.uint8))  # [n, out]
    ordered = stored.view(len(stored), -1, 8)[..., _AWQ_PLACES].flatten(1)
    return ordered.t().contiguous()


@dataclass(frozen=True)
class PackedScheme(_Grouped):
    """compressed-tensors' pack-quantized: words along the input, zero words along the output."""

    has_zeros: bool = False
    act_order: bool = False

    @property
    def label(self) -> str:
        order = ", act-order" if self.act_order else ""
        zeros = ", zero points" if self.has_zeros else ""
        return f"compressed-tensors {self.bits} bits by {self.group_size}{zeros}{order}"

    @property
    def optional(self) -> frozenset[str]:
        unused = {"weight_shape", "input_scale", "input_zero_point", "weight_g_idx"}
        return frozenset(unused if self.has_zeros else {*unused, "weight_zero_point"})

    marks = frozenset({"weight_packed"})

    def expected(self, shape: tuple[int, int]) -> dict[str, Expected]:
        rows, columns, groups = self.check(shape)
        per_word = _WORD // self.bits
        cut = None if self.act_order else 1
        one = Expected((), rows=None, columns=None)
        return {
            "weight_packed": Expected((rows, columns // per_word)),
            "weight_scale": Expected((rows, groups), columns=cut),
            "weight_zero_point": Expected((rows // per_word, groups), columns=cut),
            "weight_shape": Expected((2,), rows=None, columns=None),
            "weight_g_idx": Expected((columns,), rows=None, columns=0),
            "input_scale": one,
            "input_zero_point": one,
        }

    def convert(self, tensors: Tensors, shard: Shard) -> QuantizedWeight:
        _check_words(tensors, "weight_packed", "weight_zero_point")
        packed = tensors["weight_packed"].contiguous().view(torch.uint8)
        scales = scales_of(tensors, "weight_scale").contiguous()
        zeros = None
        if self.has_zeros:
            words = tensors["weight_zero_point"].t().contiguous()  # [groups, out / per_word]
            numbers = words.view(torch.uint8)
            zeros = (unpack_nibbles(numbers) if self.bits == 4 else numbers).t().contiguous()
        weight = _weight(packed, scales, zeros, self.bits)
        if "weight_g_idx" not in tensors:
            return weight
        group_size = shard.shape[1] if self.group_size == -1 else self.group_size
        groups = _groups(tensors, "weight_g_idx")
        in_order = _in_order(groups, group_size, shard)
        if (groups == -1).all():  # the format's mark for columns in order
            groups = in_order
        if self.act_order:
            return order_columns(weight, groups, group_size)
        if not torch.equal(groups, in_order):
            raise ModelError(
                "weight_g_idx has columns in activation order, but quantization_config's actorder "
                'does not say so: set it to "group" in config.json'
            )
        return weight


def _groups(tensors: Tensors, name: str) -> torch.Tensor:
    """The quantization group of each column."""
    check_type(name, tensors[name], torch.int32, torch.int64)
    return tensors[name].long()


def _in_order(groups: torch.Tensor, group_size: int, shard: Shard) -> torch.Tensor:
    """Each column's quantization group, if columns are in the matrix's own order."""
    columns = torch.arange(len(groups), device=groups.device)
    return (shard.first_column + columns) // group_size


def _check_words(tensors: Tensors, *names: str) -> None:
    for name in names:
        if name in tensors:
            check_type(name, tensors[name], torch.int32, torch.uint32)


def _weight(
    packed: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bits: int,
) -> W4Weight:
    if zeros is not None and (zeros == 1 << (bits - 1)).all():
        zeros = None  # symmetric
    # A shard may lie within a single quantization group.
    columns = packed.shape[1] * 8 // bits
    return W4Weight(packed, scales, zeros, columns // scales.shape[1], bits)


def order_columns(weight: W4Weight, groups: torch.Tensor, group_size: int) -> W4Weight:
    """Sort columns by quantization group. `groups` [in] is the scale column of each column.

    A shard may contain any number of a group's columns. They are padded with zero columns to small
    groups of equal size.
    """
    columns, num_groups = len(groups), weight.scales.shape[1]
    if ((groups < 0) | (groups >= num_groups)).any():
        raise ModelError(
            f"g_idx names groups from {int(groups.min())} to {int(groups.max())}, but the matrix "
            f"has {num_groups}: the checkpoint is damaged"
        )
    in_order = torch.arange(columns, device=groups.device) // group_size
    if torch.equal(groups, in_order) and num_groups * group_size == columns:
        return weight
    counts = torch.bincount(groups, minlength=num_groups)
    size = group_size
    if ((counts != 0) & (counts != group_size)).any():
        size = math.gcd(_SMALL_GROUP, group_size)
    lengths = -(-counts // size) * size  # of each quantization group, padded
    owners = torch.repeat_interleave(torch.arange(len(counts), device=groups.device), lengths)
    perm = torch.zeros(len(owners), dtype=torch.int64, device=groups.device)
    order = groups.argsort(stable=True)
    # Where each group's columns begin, among the sorted and among the padded columns.
    shift = (lengths.cumsum(0) - lengths) - (counts.cumsum(0) - counts)
    places = torch.arange(columns, device=groups.device) + shift[groups[order]]
    perm[places] = order
    is_real = torch.zeros(len(owners), dtype=torch.bool, device=groups.device)
    is_real[places] = True
    numbers = unpack_nibbles(weight.packed) if weight.bits == 4 else weight.packed
    kept = owners[::size]  # original group of each small group
    scales = weight.scales[:, kept]
    zeros = None if weight.zeros is None else weight.zeros[:, kept]
    half = torch.tensor(1 << (weight.bits - 1), dtype=torch.uint8, device=groups.device)
    nothing = half if zeros is None else zeros.repeat_interleave(size, dim=1)
    numbers = torch.where(is_real, numbers[:, perm], nothing)
    packed = pack_nibbles(numbers) if weight.bits == 4 else numbers
    return W4Weight(packed.contiguous(), scales.contiguous(), zeros, size, weight.bits, perm)
