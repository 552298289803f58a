"""The torch reference of every op, which faster implementations are tested against."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from penstock.ops.attention import AttentionMetadata, paged_attention, varlen_attention
from penstock.ops.attention import write_kv as write_kv
from penstock.ops.delta_net import gated_delta_rule
from penstock.ops.experts import experts, route
from penstock.ops.gguf import gguf_embed, gguf_experts, gguf_linear, prepare_gguf, stack_gguf
from penstock.ops.latent_attention import latent_attention, write_latent
from penstock.ops.lora import embedding_slots, group_rows, lora_slots
from penstock.ops.mamba2 import mamba2_scan
from penstock.ops.quantized import (
    fp4_linear,
    fp8_linear,
    int8_linear,
    table_linear,
    w4_linear,
    w8_linear,
)
from penstock.ops.quantized_experts import (
    fp4_experts,
    fp8_experts,
    table_experts,
    w4_experts,
    w8_experts,
)
from penstock.ops.recurrent import causal_conv
from penstock.ops.sampling import choose_tokens
from penstock.ops.sharded_sampling import (
    best_of_share,
    draw_from_share,
    shared_cutoff,
    top_of_share,
)

__all__ = [
    "AttentionMetadata",
    "add_rms_norm",
    "best_of_share",
    "causal_conv",
    "choose_tokens",
    "draw_from_share",
    "embed",
    "embedding_slots",
    "experts",
    "fp4_experts",
    "fp4_linear",
    "fp8_experts",
    "fp8_linear",
    "gated_delta_rule",
    "gguf_embed",
    "gguf_experts",
    "gguf_linear",
    "group_rows",
    "int8_linear",
    "latent_attention",
    "layer_norm",
    "linear",
    "lora_slots",
    "mamba2_scan",
    "paged_attention",
    "prepare_gguf",
    "rms_norm",
    "rotate",
    "rotate_pair",
    "route",
    "shared_cutoff",
    "silu_mul",
    "stack_gguf",
    "table_experts",
    "table_linear",
    "top_of_share",
    "varlen_attention",
    "w4_experts",
    "w4_linear",
    "w8_experts",
    "w8_linear",
    "write_kv",
    "write_latent",
]


def embed(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows of `weight`. token_ids [n] -> [n, hidden]."""
    return F.embedding(token_ids, weight)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [n, in] @ weight [out, in]^T + bias; in `out` [n, out] if given."""
    if out is None:
        return F.linear(x, weight, bias)
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, computed in float32."""
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * x32.to(x.dtype)).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, and the sum, which is the next residual."""
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """(x - mean) / deviation * weight + bias over the last dimension, computed in float32.

    The residual, if any, is added to x first. The weight may have several dimensions: [heads, d]
    for x [n, heads, d].
    """
    centred = (x if residual is None else x + residual).float()
    centred = centred - centred.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    return (normed if bias is None else normed + bias.float()).to(x.dtype)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up. x [n, 2 * d] holds gate and up side by side -> [n, d]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in halves layout. x [n, heads, d]; cos, sin [n, 1, rotary_dim / 2].

    Dimensions past rotary_dim are unchanged.
    """
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    rotated = [first * cos - second * sin, second * cos + first * sin]
    if 2 * half < x.shape[-1]:
        rotated.append(x[..., 2 * half :])
    return torch.cat(rotated, dim=-1)


def rotate_pair(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate both. They may be changed in place: use only the returned tensors."""
    return rotate(query, cos, sin), rotate(key, cos, sin)
