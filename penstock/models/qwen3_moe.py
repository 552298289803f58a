"""Qwen 3 with experts: Qwen 3's attention, and in most layers a mixture of experts."""

from __future__ import annotations

from torch import nn

from penstock.layers.blocks import RotaryAttention
from penstock.layers.experts import Experts, ExpertsConfig
from penstock.models.config import DecoderConfig, read_int
from penstock.models.decoder import DecoderLM
from penstock.ops.experts import Routing
from penstock.protocol.errors import ModelError


def is_sparse(config: DecoderConfig, index: int) -> bool:
    """Whether layer `index` has experts; the others have an MLP."""
    dense = config.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise ModelError(f"config.json: mlp_only_layers must list layers, got {dense!r:.80}")
    step = read_int(config.raw, "decoder_sparse_step", 1)
    return index not in dense and (index + 1) % step == 0


def read_num_experts(config: DecoderConfig) -> tuple[int, int]:
    """How many experts there are, and how many of them a token goes through."""
    raw = config.raw
    name = "num_experts" if raw.get("num_experts") is not None else "num_local_experts"
    num_experts, top_k = read_int(raw, name), read_int(raw, "num_experts_per_tok")
    if top_k > num_experts:
        raise ModelError(
            f"config.json: num_experts_per_tok ({top_k}) must be at most {name} ({num_experts})"
        )
    return num_experts, top_k


class Qwen3MoeForCausalLM(DecoderLM):
    def attention(self, index: int) -> RotaryAttention:
        raw = self.config.raw
        bias = bool(raw.get("attention_bias", False))
        return self.rotary_attention(
            index,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm_eps=self.config.rms_norm_eps,
            window=self.config.sliding_window if raw.get("use_sliding_window") else None,
        )

    def mlp(self, index: int) -> nn.Module:
        config = self.config
        if not is_sparse(config, index):
            return super().mlp(index)
        num_experts, top_k = read_num_experts(config)
        renormalize = bool(config.raw.get("norm_topk_prob", False))
        experts = ExpertsConfig(
            num_experts=num_experts,
            hidden_size=config.hidden_size,
            intermediate_size=read_int(config.raw, "moe_intermediate_size"),
            routing=Routing(top_k, renormalize=renormalize),
        )
        return Experts(self.build, experts)
