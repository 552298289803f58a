"""The ops of the Triton backend. All others come from the reference."""

from __future__ import annotations

from penstock.ops.triton.attention import paged_attention
from penstock.ops.triton.fp8 import fp8_linear, prepare_fp8
from penstock.ops.triton.fp8_experts import fp8_experts
from penstock.ops.triton.gguf import gguf_embed, gguf_linear
from penstock.ops.triton.gguf_experts import gguf_experts
from penstock.ops.triton.gguf_layout import prepare_gguf, stack_gguf
from penstock.ops.triton.int8 import int8_linear
from penstock.ops.triton.latent_attention import latent_attention
from penstock.ops.triton.latent_rotary import norm_rotate_latent
from penstock.ops.triton.linear import linear
from penstock.ops.triton.lora import embedding_slots, lora_slots
from penstock.ops.triton.lora_tiles import group_rows
from penstock.ops.triton.packed import fp4_linear, table_linear, w4_linear, w8_linear
from penstock.ops.triton.packed_experts import fp4_experts, table_experts, w4_experts, w8_experts
from penstock.ops.triton.packed_layout import prepare_fp4, prepare_table, prepare_w4
from penstock.ops.triton.pointwise import add_rms_norm, embed, layer_norm, rms_norm, silu_mul
from penstock.ops.triton.recurrent import causal_conv, gated_delta_rule, mamba2_scan
from penstock.ops.triton.rotary import norm_rotate_write
from penstock.ops.triton.routing import route
from penstock.ops.triton.sampling import choose_tokens
from penstock.ops.triton.sharded_sampling import best_of_share, draw_from_share, shared_cutoff
from penstock.ops.triton.varlen_attention import varlen_attention
from penstock.ops.triton.vision_rotary import rotate_rows

__all__ = [
    "add_rms_norm",
    "best_of_share",
    "causal_conv",
    "choose_tokens",
    "draw_from_share",
    "embed",
    "embedding_slots",
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
    "norm_rotate_latent",
    "norm_rotate_write",
    "paged_attention",
    "prepare_fp4",
    "prepare_fp8",
    "prepare_gguf",
    "prepare_table",
    "prepare_w4",
    "rms_norm",
    "rotate_rows",
    "route",
    "shared_cutoff",
    "silu_mul",
    "stack_gguf",
    "table_experts",
    "table_linear",
    "varlen_attention",
    "w4_experts",
    "w4_linear",
    "w8_experts",
    "w8_linear",
]
