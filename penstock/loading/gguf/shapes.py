"""Checks sizes in the metadata against the tensors, before a model is built from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.loading.gguf.architecture import GGUFArchitecture
from penstock.loading.gguf.file import GGUFTensor
from penstock.loading.gguf.metadata import LAYER_OF_TENSOR, Metadata, fail, find_tensor

Shape = tuple[int, ...]


def check_sizes(
    metadata: Metadata, config: Mapping[str, Any], architecture: GGUFArchitecture
) -> None:
    """Check the embedding and the first layers. Others are checked when they load."""
    file, num_layers = metadata.file, config["num_hidden_layers"]
    layers = {int(m.group(1)) for name in file.tensors if (m := LAYER_OF_TENSOR.match(name))}
    own = {layer for layer in layers if layer < num_layers}
    if len(own) != num_layers or len(layers) > num_layers + metadata.num_extra_layers():
        fail(file, f"metadata says {num_layers} layers, but there are tensors of {len(layers)}")
    embedding = find_tensor(file, "token_embd.weight", num_dims=2)
    _check(metadata, embedding, (config["vocab_size"], config["hidden_size"]))
    for name, shape in (
        *_attention_shapes(metadata, config, architecture),
        *_mlp_shapes(metadata, config, architecture),
        *_recurrent_shapes(metadata, config),
    ):
        _check(metadata, metadata.first_tensor(name, len(shape)), shape)


def _check(metadata: Metadata, tensor: GGUFTensor, shape: Shape) -> None:
    if tensor.shape != shape:
        fail(
            metadata.file,
            f"tensor {tensor.name!r} has the shape {list(tensor.shape)}, but by the metadata it "
            f"must be {list(shape)}",
        )


def _attention_shapes(
    metadata: Metadata, config: Mapping[str, Any], architecture: GGUFArchitecture
) -> Iterator[tuple[str, Shape]]:
    if architecture.attention == "none":
        return
    hidden, heads, head_dim = (
        config["hidden_size"],
        config["num_attention_heads"],
        config["head_dim"],
    )
    if architecture.attention == "latent":
        rank, q_rank = config["kv_lora_rank"], config["q_lora_rank"]
        q_rows = heads * (config["qk_nope_head_dim"] + head_dim)
        yield "attn_kv_a_mqa.weight", (rank + head_dim, hidden)
        if q_rank is None:
            yield "attn_q.weight", (q_rows, hidden)
        else:
            yield "attn_q_a.weight", (q_rank, hidden)
            yield "attn_q_b.weight", (q_rows, q_rank)
        yield "attn_output.weight", (hidden, heads * config["v_head_dim"])
        return
    q_rows = heads * head_dim * (2 if architecture.attention == "gated" else 1)
    k_rows = config["num_key_value_heads"] * head_dim
    if architecture.attention == "heads" and metadata.has_tensor("blk.0.attn_qkv.weight"):
        yield "attn_qkv.weight", (q_rows + 2 * k_rows, hidden)
    else:
        yield "attn_q.weight", (q_rows, hidden)
        yield "attn_k.weight", (k_rows, hidden)


def _mlp_shapes(
    metadata: Metadata, config: Mapping[str, Any], architecture: GGUFArchitecture
) -> Iterator[tuple[str, Shape]]:
    kind, hidden = architecture.mlp, config["hidden_size"]
    if kind in ("experts", "mixed"):
        experts = metadata.integer("expert_count")
        yield "ffn_gate_inp.weight", (experts, hidden)
        yield "ffn_down_exps.weight", (experts, hidden, metadata.expert_size())
        shared = _shared_size(metadata, config)
        if shared:
            yield "ffn_gate_shexp.weight", (shared, hidden)
    has_dense = kind == "mixed" and (
        config.get("first_k_dense_replace", 0) > 0 or config.get("interleave_moe_layer_step", 1) > 1
    )
    if kind == "gated" or has_dense:
        yield "ffn_gate.weight", (metadata.integer("feed_forward_length"), hidden)
    elif kind in ("fused", "plain"):
        size = metadata.integer("feed_forward_length")
        yield "ffn_up.weight", (2 * size if kind == "fused" else size, hidden)


def _shared_size(metadata: Metadata, config: Mapping[str, Any]) -> int:
    """The intermediate size of the shared expert; 0 if there is none."""
    if "n_shared_experts" in config:
        return int(config["n_shared_experts"]) * metadata.expert_size()
    return int(config.get("shared_expert_intermediate_size", 0))


def _recurrent_shapes(metadata: Metadata, config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    if metadata.get("ssm.inner_size") is None:
        return
    inner, width = metadata.integer("ssm.inner_size"), metadata.integer("ssm.conv_kernel")
    of_groups = metadata.integer("ssm.group_count") * metadata.integer("ssm.state_size")
    yield "ssm_conv1d.weight", (inner + 2 * of_groups, width)
    yield "ssm_dt.bias", (metadata.integer("ssm.time_step_rank"),)
    yield "ssm_out.weight", (config["hidden_size"], inner)
