"""Reads the configuration of compressed-tensors: config groups of layers, each with a scheme."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.layers.quantized.packed import PackedScheme
from penstock.layers.quantized.patterns import Expression, names_in, object_in
from penstock.layers.quantized.plan import Kind
from penstock.layers.quantized.schemes import Fp4Scheme, Fp8Scheme, Int8Scheme, Scheme
from penstock.ops.quantized import BLOCK
from penstock.protocol.errors import ModelError

_KINDS: dict[Kind, str] = {"linear": "Linear", "router": "Linear", "vocabulary": "Linear"}
_SPARSE = ("sparse-24-bitmask", "sparse-bitmask", "marlin-24", "24")


@dataclass(frozen=True)
class ConfigGroup:
    targets: tuple[str, ...]  # names, patterns with "re:", or classes
    scheme: Scheme

    def specificity(self, name: str, kind: Kind) -> int:
        """0 if no target matches. Names rank above patterns, patterns above classes."""
        if name in self.targets:
            return 3
        if any(target[:3] == "re:" and re.match(target[3:], name) for target in self.targets):
            return 2
        return 1 if _KINDS[kind] in self.targets and not name.endswith("embed_tokens") else 0


@dataclass(frozen=True)
class CompressedTensors:
    groups: tuple[ConfigGroup, ...]
    skipped: tuple[str, ...]  # in the same three forms as targets
    ignored: tuple[str, ...] = (
        r"\.(k|v|q|kv|prob_output|output)_(scale|zero_point)$",
        r"\.(k|v|q)_(global_scale|observer.*)$",
    )
    expressions: tuple[Expression, ...] = ()

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> CompressedTensors:
        form = object_in(raw, "sparsity_config").get("format", "dense")
        if form != "dense" or raw.get("format") in _SPARSE:
            raise ModelError(
                f"config.json: sparse weights ({form!r}) are not supported: take a checkpoint "
                "without 2:4 sparsity"
            )
        if raw.get("transform_config"):
            raise ModelError(
                "config.json: transform_config (rotated weights) is not supported: take a "
                "checkpoint without transforms"
            )
        status = raw.get("quantization_status", "compressed")
        if status not in ("compressed", "frozen"):
            raise ModelError(f"config.json: quantization_status must be compressed, got {status!r}")
        groups = object_in(raw, "config_groups")
        for name, group in groups.items():
            if not isinstance(group, Mapping):
                raise ModelError(
                    f"config.json: {name} of config_groups must be an object, got {group!r:.80}"
                )
        made = tuple(
            ConfigGroup(names_in(group, "targets") or ("Linear",), _scheme(name, group))
            for name, group in groups.items()
        )
        return cls(made, names_in(raw, "ignore"))

    def scheme(self, name: str, kind: Kind) -> Scheme | None:
        for entry in self.skipped:
            if entry == name or (entry[:3] == "re:" and re.match(entry[3:], name)):
                return None
            if entry == _KINDS[kind]:
                return None
        found = [(group.specificity(name, kind), group.scheme) for group in self.groups]
        best = max((rank for rank, _ in found), default=0)
        return next((scheme for rank, scheme in found if rank == best), None) if best else None


def _scheme(name: str, group: Mapping[str, Any]) -> Scheme:
    weights, inputs = _arguments(name, group, "weights"), None
    if group.get("input_activations") is not None:
        inputs = _arguments(name, group, "input_activations")
    bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
    strategy: Any = weights.get("strategy")
    size: Any = weights.get("group_size")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    static = inputs is not None and not inputs.get("dynamic", False)
    symmetric = weights.get("symmetric", True)
    if inputs is not None and bits == 8:
        of_inputs = (inputs.get("num_bits", 8), inputs.get("type", "int"))
        if of_inputs != (8, kind):
            raise ModelError(
                f"config.json: {name} of config_groups has {bits}-bit {kind} weights and "
                f"{of_inputs[0]}-bit {of_inputs[1]} activations: both must be of one kind"
            )
    if (bits, kind) == (8, "float") and symmetric and strategy in ("tensor", "channel", "block"):
        if strategy == "block" and weights.get("block_structure") != [BLOCK, BLOCK]:
            raise ModelError(
                f"config.json: {name} has fp8 blocks of {weights.get('block_structure')!r:.80}; "
                f"supported: [{BLOCK}, {BLOCK}]"
            )
        return Fp8Scheme(strategy, static)
    if (bits, kind) == (4, "float") and size in (16, 32):
        return Fp4Scheme("nvfp4" if size == 16 else "mxfp4")
    if kind == "int" and (bits, inputs is None) == (8, False) and strategy in ("tensor", "channel"):
        return Int8Scheme(strategy, "static" if static else "dynamic")
    if kind == "int" and bits in (4, 8) and strategy in ("group", "channel"):
        if bits == 8 and group.get("format") in ("int-quantized", "naive-quantized"):
            return Int8Scheme("channel", "none")
        order = weights.get("actorder") in ("group", True)
        columns = -1 if strategy == "channel" else size
        return PackedScheme(bits, columns, not symmetric, order)
    raise ModelError(
        f"config.json: {name} of config_groups has {bits}-bit {kind} weights by {strategy}, which "
        "is not supported: take fp8, int8, 4- or 8-bit integers by group, NVFP4 or MXFP4"
    )


def _arguments(name: str, group: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = group.get(key)
    if not isinstance(found, Mapping):
        raise ModelError(
            f"config.json: {key} of {name} in config_groups must be an object, got {found!r:.80}"
        )
    return found
