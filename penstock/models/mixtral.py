"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from torch import nn

from penstock.layers.experts import Experts, ExpertsConfig
from penstock.models.base import WeightTable
from penstock.models.decoder import DecoderLM
from penstock.models.mistral import MistralForCausalLM
from penstock.models.qwen3_moe import read_num_experts
from penstock.ops.experts import Routing


class MixtralForCausalLM(MistralForCausalLM):
    weights = WeightTable(
        ignored=DecoderLM.weights.ignored,
        renamed={
            r"\.block_sparse_moe\.": ".mlp.",
            r"\.w1\.": ".gate_proj.",
            r"\.w3\.": ".up_proj.",
            r"\.w2\.": ".down_proj.",
        },
    )

    def mlp(self, index: int) -> nn.Module:
        config = self.config
        num_experts, top_k = read_num_experts(config)
        experts = ExpertsConfig(
            num_experts=num_experts,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            routing=Routing(top_k, renormalize=True),
        )
        return Experts(self.build, experts)
