"""MiMo 7B: Qwen 2 with a multi-token-prediction (MTP) layer."""

from __future__ import annotations

from dataclasses import replace

from penstock.models.base import MtpLayout
from penstock.models.qwen2 import Qwen2ForCausalLM

_LAYER = "model.mtp_layers.{depth}"


class MiMoForCausalLM(Qwen2ForCausalLM):
    weights = replace(
        Qwen2ForCausalLM.weights,
        ignored=(*Qwen2ForCausalLM.weights.ignored, r"^model\.mtp_layers\."),
    )
    mtp_layout = MtpLayout(
        layer=_LAYER,
        embedding_norm=_LAYER + ".token_layernorm",
        hidden_norm=_LAYER + ".hidden_layernorm",
        projection=_LAYER + ".input_proj",
        norm=_LAYER + ".final_layernorm",
        hidden_first=True,
        passes_normed=True,
    )
