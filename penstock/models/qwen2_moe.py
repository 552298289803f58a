"""Qwen 1.5 and 2 with experts: Qwen 2's attention, experts, and one that all tokens share."""

from __future__ import annotations

from torch import nn

from penstock.layers.blocks import RotaryAttention
from penstock.layers.experts import Experts, ExpertsConfig
from penstock.models.config import read_int
from penstock.models.decoder import DecoderLM
from penstock.models.qwen2 import qwen_window
from penstock.models.qwen3_moe import is_sparse, read_num_experts
from penstock.ops.experts import Routing


class Qwen2MoeForCausalLM(DecoderLM):
    def attention(self, index: int) -> RotaryAttention:
        bias = bool(self.config.raw.get("qkv_bias", True))
        return self.rotary_attention(index, qkv_bias=bias, window=qwen_window(self.config, index))

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
            shared_size=read_int(config.raw, "shared_expert_intermediate_size"),
            shared_gate=True,
        )
        return Experts(self.build, experts)
