"""Writes a quantized copy of a checkpoint, one tensor at a time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

import torch

from penstock.config import LoadConfig
from penstock.layers.quantization import check_floats
from penstock.loading.checkpoint import open_checkpoint, read_floats
from penstock.loading.source import ModelSource
from penstock.loading.write import SHARD_BYTES, ShardWriter, new_checkpoint
from penstock.protocol.errors import ConfigError
from penstock.quantize.methods import Method

# Matrices that do not belong to linear layers, by the end of their names.
NOT_LINEAR = re.compile(r"(embed\w*|wte|wpe|\w*norm\w*|conv1d)\.weight$")
# Linear layers that stay unquantized: the heads and the routers, whose few numbers decide a lot.
KEPT = (
    r"lm_head$",
    r".*\.(gate|router|shared_expert_gate|block_sparse_moe\.gate)$",
    r"(\w+\.)?(score|classifier|pre_classifier|pooler|head)(\.(dense|out_proj|\d+))*$",
)
# Vision and audio modules beside a text model: small, and not run here.
NOT_TEXT = r"(.*\.)?(vision_tower|vision_model|visual|audio_tower|multi_modal_projector)\..*"
# Layers that engines fuse into one matrix. They are quantized together or not at all.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("gate_proj", "up_proj"),
)


@dataclass
class Report:
    """What happened to a checkpoint."""

    quantized: list[str] = field(default_factory=list)  # layers
    kept: dict[str, str] = field(default_factory=dict)  # unquantized linear layers, and why
    bytes_before: int = 0
    bytes_after: int = 0


def write_quantized(
    source: ModelSource,
    out: Path,
    method: Method,
    kept: Sequence[str] = (),
    moments: Mapping[str, torch.Tensor] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Report:
    """Write `source` with its linear layers quantized, except those that match `kept`.

    `moments` are the second moments of the inputs, by layer. Raises as `new_checkpoint`.
    """
    with new_checkpoint(source, out, shard_bytes) as new:
        report = _convert(source, method, [*KEPT, NOT_TEXT, *kept], moments or {}, new.writer)
        new.config["quantization_config"] = method.config(_ignored(report))
    return report


def _ignored(report: Report) -> list[str]:
    """Linear layers that readers must not treat as quantized.

    Names are those of the checkpoint. If the text model is part of another, readers name its parts
    differently. Then patterns match the ends of names.
    """
    # A tied head is not in the file, but it is a linear layer too.
    has_head = any(layer.rpartition(".")[2] == "lm_head" for layer in report.kept)
    ignored = [] if has_head else ["re:.*lm_head$"]
    if any(re.match(NOT_TEXT, layer) for layer in report.kept):
        ignored.append(f"re:{NOT_TEXT}")
    for layer in report.kept:
        if re.match(NOT_TEXT, layer):
            continue
        inner = layer.partition("language_model.")[2]
        last = inner[inner.find("layers.") :] if "layers." in inner else inner
        ignored.append(f"re:.*{re.escape(last)}$" if last else layer)
    return ignored


def _convert(
    source: ModelSource,
    method: Method,
    kept: Sequence[str],
    moments: Mapping[str, torch.Tensor],
    writer: ShardWriter,
) -> Report:
    report = Report()
    checkpoint = open_checkpoint(source, LoadConfig())
    _check_fused({name.removesuffix(".weight") for name in checkpoint.names()}, kept)
    for name, tensor in read_floats(checkpoint, "Quantizing"):
        report.bytes_before += tensor.nbytes
        pieces = {name: tensor}
        if tensor.ndim == 2 and name.endswith(".weight") and not NOT_LINEAR.search(name):
            layer = name.removesuffix(".weight")
            reason = _reason_to_keep(layer, tensor, method, kept)
            if reason is None:
                found = method.compress(tensor, moments.get(layer))
                pieces = {f"{layer}.{suffix}": piece for suffix, piece in found.items()}
                report.quantized.append(layer)
            else:
                report.kept[layer] = reason
        elif tensor.ndim == 3 and ".experts." in name:
            report.kept[name.removesuffix(".weight")] = "it has all experts in one tensor"
        for piece_name, piece in pieces.items():
            report.bytes_after += piece.nbytes
            writer.add(piece_name, piece)
    if not report.quantized:
        reasons = "; ".join(f"{layer}: {why}" for layer, why in report.kept.items())
        raise ConfigError(f"{source.name} has no layer that could be quantized ({reasons:.400})")
    return report


def _check_fused(layers: Set[str], kept: Sequence[str]) -> None:
    """Raise ConfigError if a pattern excludes only some parts of a fused layer."""
    for layer in sorted(layers):
        parent, _, part = layer.rpartition(".")
        parts = next((parts for parts in FUSED if part in parts), ())
        if not parts or _pattern_of(layer, kept) is None:
            continue
        for other in (f"{parent}.{name}" for name in parts):
            if other in layers and _pattern_of(other, kept) is None:
                raise ConfigError(
                    f"--keep has {layer}, but not {other}: engines compute them as one matrix. "
                    f"Keep all of {', '.join(parts)}, or none"
                )


def _pattern_of(layer: str, kept: Sequence[str]) -> str | None:
    return next((pattern for pattern in kept if re.match(pattern, layer)), None)


def _reason_to_keep(
    layer: str, weight: torch.Tensor, method: Method, kept: Sequence[str]
) -> str | None:
    pattern = _pattern_of(layer, kept)
    if pattern is not None:
        return f"it matches {pattern}"
    if not weight.is_floating_point():
        return f"its numbers are {weight.dtype}"
    check_floats(layer, weight)
    return method.refusal(weight)
