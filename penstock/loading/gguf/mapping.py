"""Applies rules to a GGUF file's tensors: each gets its Hugging Face name and its transform."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.loading.gguf.file import GGUFFile, GGUFTensor
from penstock.loading.gguf.metadata import fail
from penstock.loading.gguf.rules import (
    HalfOfKVB,
    LeadingOnes,
    Piece,
    Rule,
    SplitExperts,
    Stored,
    Transform,
    UnpermuteRope,
)

_LAYER = re.compile(r"^((?:v\.)?blk)\.(0|[1-9][0-9]{0,5})\.")  # of a decoder or a vision tower


@dataclass(frozen=True)
class MappedTensor:
    """A tensor of a GGUF file under its Hugging Face name."""

    name: str
    tensor: GGUFTensor
    transform: Transform | None
    scale: GGUFTensor | None = None  # factor of the whole tensor, or of each expert


def apply_rules(
    file: GGUFFile,
    rules: Mapping[str, Rule],
    config: Mapping[str, Any],
    is_left_out: Callable[[str], bool],
    owner: str,
) -> list[MappedTensor]:
    """Every tensor under its Hugging Face name, in file order, but those that are left out.

    Raises ModelError for tensors without a rule, which `owner` does not have.
    """
    mapped: list[MappedTensor] = []
    unknown: list[str] = []
    for tensor in file.tensors.values():
        if is_left_out(tensor.name) or _is_scale(file, tensor):
            continue
        layer = _LAYER.match(tensor.name)
        found = _find_rule(rules, _LAYER.sub(r"\1.{n}.", tensor.name))
        if found is None:
            unknown.append(tensor.name)
            continue
        rule, ending = found
        _check_transform(file, tensor, rule.transform, config)
        name = rule.name.replace("{n}", layer.group(2) if layer else "") + ending
        scale = file.tensors.get(f"{tensor.name.removesuffix('.weight')}.scale")
        mapped.append(MappedTensor(name, tensor, rule.transform, scale))
    if unknown:
        fail(
            file,
            f"{len(unknown)} tensors that {owner} does not have: "
            f"{', '.join(sorted(unknown)[:4])}{' ...' if len(unknown) > 4 else ''}",
        )
    return mapped


def _is_scale(file: GGUFFile, tensor: GGUFTensor) -> bool:
    """Whether a tensor only scales another, as in NVFP4, or that other's input."""
    stem, _, kind = tensor.name.rpartition(".")
    return kind in ("scale", "input_scale") and f"{stem}.weight" in file.tensors


def _find_rule(rules: Mapping[str, Rule], name: str) -> tuple[Rule, str] | None:
    """A tensor's rule, and the suffix to append to the rule's name."""
    rule = rules.get(name)
    if rule is not None and rule.is_whole:
        return rule, ""
    stem, _, kind = name.rpartition(".")
    rule = rules.get(stem)
    if rule is None or rule.is_whole or kind not in ("weight", "bias"):
        return None
    return rule, f".{kind}"


def _check_transform(
    file: GGUFFile, tensor: GGUFTensor, transform: Transform | None, config: Mapping[str, Any]
) -> None:
    """Refuse a shape that a transform cannot be reversed for."""
    shape = tensor.shape
    if isinstance(transform, UnpermuteRope):
        heads = config[transform.heads]
        is_plain_bias = len(shape) == 1 and tensor.type.block_size == 1
        if not (is_plain_bias or len(shape) == 2) or shape[0] % (2 * heads):
            fail(
                file,
                f"tensor {tensor.name!r} ({tensor.type.name}, shape {list(shape)}) does not "
                f"split into {heads} heads",
            )
    elif isinstance(transform, SplitExperts):
        dims = 2 if tensor.name.endswith(".bias") else 3
        if len(shape) != dims or shape[1] % len(transform.parts):
            fail(file, f"tensor {tensor.name!r} must have {dims} dimensions, got {list(shape)}")
    elif isinstance(transform, HalfOfKVB) and len(shape) != 3:
        fail(file, f"tensor {tensor.name!r} must have 3 dimensions, got {list(shape)}")
    elif isinstance(transform, Piece) and transform.kind == "frames" and len(shape) != 4:
        fail(file, f"tensor {tensor.name!r} must have 4 dimensions, got {list(shape)}")
    elif isinstance(transform, LeadingOnes) and len(shape) > transform.num_dims:
        fail(
            file,
            f"tensor {tensor.name!r} must have at most {transform.num_dims} dimensions, got "
            f"{list(shape)}",
        )
    elif transform is Stored.SQUEEZED and len(shape) != 2:
        fail(file, f"tensor {tensor.name!r} must have 2 dimensions, got {list(shape)}")
