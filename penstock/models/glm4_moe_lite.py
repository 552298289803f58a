"""GLM-4.7-Flash: DeepSeek V3's layers under GLM's settings."""

from __future__ import annotations

from torch import nn

from penstock.layers.experts import Experts
from penstock.models.decoder import DecoderLM
from penstock.models.deepseek_v3 import DeepseekV3ForCausalLM
from penstock.protocol.errors import ModelError


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    defaults = {
        "rms_norm_eps": 1e-5,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "n_shared_experts": 1,
    }

    def mlp(self, index: int) -> nn.Module:
        kinds = self.config.raw.get("mlp_layer_types")
        if kinds is None:
            return super().mlp(index)
        if not isinstance(kinds, list) or len(kinds) < self.config.num_layers:
            raise ModelError(
                f"config.json: mlp_layer_types must name the kind of each of "
                f"{self.config.num_layers} layers, got {kinds!r:.80}"
            )
        if kinds[min(index, len(kinds) - 1)] == "sparse":  # an MTP layer is like the last
            return Experts(self.build, self.experts())
        return DecoderLM.mlp(self, index)
