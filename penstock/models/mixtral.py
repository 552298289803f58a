"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from torch import nn

from penstock.models.decoder import DecoderLM
from penstock.models.experts import make_experts
from penstock.models.mistral import MistralForCausalLM


class MixtralForCausalLM(MistralForCausalLM):
    weights = DecoderLM.weights.renaming(
        {
            r"\.block_sparse_moe\.": ".mlp.",
            r"\.w1\.": ".gate_proj.",
            r"\.w3\.": ".up_proj.",
            r"\.w2\.": ".down_proj.",
        }
    )

    def mlp(self, index: int) -> nn.Module:
        return make_experts(
            self.build, self.config, self.config.intermediate_size, renormalize=True
        )
