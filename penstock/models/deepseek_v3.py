"""DeepSeek V3 and R1, Kimi K2: V2 with sigmoid scores and a bias for expert selection."""

from __future__ import annotations

from dataclasses import replace

from penstock.layers.build import Build
from penstock.layers.experts import ExpertsConfig
from penstock.models.base import MtpLayout, WeightTable
from penstock.models.config import DecoderConfig
from penstock.models.deepseek_v2 import DeepseekV2ForCausalLM, routed_experts

NUM_EXTRA_LAYERS = 8  # after the last; more than any checkpoint has
EXTRA_LAYER = MtpLayout(
    layer="model.layers.{index}",
    embedding_norm="model.layers.{index}.enorm",
    hidden_norm="model.layers.{index}.hnorm",
    projection="model.layers.{index}.eh_proj",
    norm="model.layers.{index}.shared_head.norm",
)


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    mtp_layout = EXTRA_LAYER
    defaults = {
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_shared_experts": 1,
    }

    def __init__(self, build: Build, config: DecoderConfig) -> None:
        super().__init__(build, config)
        self.weights = without_extra_layers(self.weights, config)

    def experts(self) -> ExpertsConfig:
        return corrected_experts(self.config)


def corrected_experts(config: DecoderConfig) -> ExpertsConfig:
    """Sigmoid scores, with a bias that affects the selection but not the weight."""
    experts = routed_experts(config)
    routing = replace(experts.routing, scoring="sigmoid", group_score="top2")
    return replace(experts, routing=routing, correction=True)


def without_extra_layers(weights: WeightTable, config: DecoderConfig) -> WeightTable:
    """Ignore layers after the last: multi-token-prediction (MTP) layers, for drafts."""
    extra = "|".join(str(config.num_layers + index) for index in range(NUM_EXTRA_LAYERS))
    return replace(weights, ignored=(*weights.ignored, rf"^model\.layers\.({extra})\."))
