"""Builds MoE layers from the common config.json settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from penstock.layers.build import Build
from penstock.layers.experts import Experts, ExpertsConfig
from penstock.models.config import DecoderConfig, read_int
from penstock.ops.blocks import BlockTensor, Weight
from penstock.ops.experts import Routing
from penstock.protocol.errors import ModelError


def make_experts(
    build: Build,
    config: DecoderConfig,
    intermediate_size: int,  # of one expert
    renormalize: bool = False,
    scoring: Literal["softmax", "sigmoid"] = "softmax",
    **options: Any,
) -> Experts:
    """The experts of a layer. `options` are further settings of `ExpertsConfig`."""
    raw = config.raw
    name = "num_experts" if raw.get("num_experts") is not None else "num_local_experts"
    num_experts, top_k = read_int(raw, name), read_int(raw, "num_experts_per_tok")
    if top_k > num_experts:
        raise ModelError(
            f"config.json: num_experts_per_tok ({top_k}) must be at most {name} ({num_experts})"
        )
    experts = ExpertsConfig(
        num_experts=num_experts,
        hidden_size=config.hidden_size,
        intermediate_size=intermediate_size,
        routing=Routing(top_k, scoring=scoring, renormalize=renormalize),
        **options,
    )
    return Experts(build, experts)


def make_qwen_experts(
    build: Build, config: DecoderConfig, renormalize: bool, is_shared: bool
) -> Experts:
    """Qwen's experts. `is_shared` adds a gated expert that all tokens share."""
    raw = config.raw
    size = read_int(raw, "moe_intermediate_size")
    renormalize = bool(raw.get("norm_topk_prob", renormalize))
    shared_size = read_int(raw, "shared_expert_intermediate_size") if is_shared else 0
    return make_experts(
        build, config, size, renormalize, shared_size=shared_size, shared_gate=is_shared
    )


def is_sparse(config: DecoderConfig, index: int) -> bool:
    """Whether layer `index` of a Qwen model has experts; other layers have an MLP."""
    dense = config.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise ModelError(f"config.json: mlp_only_layers must list layers, got {dense!r:.80}")
    step = read_int(config.raw, "decoder_sparse_step", 1)
    return index not in dense and (index + 1) % step == 0


def split_experts(
    tensors: Iterable[tuple[str, Weight]], parent: str, hidden_size: int
) -> Iterator[tuple[str, Weight]]:
    """Split tensors that hold all experts of a layer into single experts.

    `parent`: the last part of the names before ``experts``. The experts are [in, out], or [out, in]
    if only that fits `hidden_size`.
    """
    where = f".{parent}.experts."
    for name, tensor in tensors:
        layer, _, matrix = name.partition(where)
        if matrix not in ("gate_up_proj", "down_proj") or isinstance(tensor, BlockTensor):
            yield name, tensor
            continue
        if tensor.dim() != 3:
            raise ModelError(
                f"tensor {name} has shape {list(tensor.shape)}, but experts are three-"
                f"dimensional: their number, inputs and outputs"
            )
        is_down = matrix == "down_proj"
        if tensor.shape[2 if is_down else 1] == hidden_size:
            tensor = tensor.transpose(1, 2)
        for expert, own in enumerate(tensor):  # [out, in]
            prefix = f"{layer}{where}{expert}."
            if is_down:
                yield f"{prefix}down_proj.weight", own.contiguous()
                continue
            for part, rows in zip(("gate_proj", "up_proj"), own.chunk(2), strict=True):
                yield f"{prefix}{part}.weight", rows.contiguous()
