"""What the reader knows about a GGUF architecture beyond its tensors' names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.loading.gguf.metadata import Metadata
from penstock.loading.gguf.rules import Rule

ROPE_FREQS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
Settings = Callable[[Metadata], dict[str, Any]]


@dataclass(frozen=True)
class GGUFArchitecture:
    """One `general.architecture`: its Hugging Face class and its tensors."""

    models: str  # for users
    hf_class: str
    model_type: str
    rules: Mapping[str, Rule]
    settings: Settings = field(default=lambda _: {})  # config.json keys beyond the common ones
    eps_key: str = "rms_norm_eps"  # in config.json
    mlp: Literal["gated", "fused", "plain", "experts", "mixed", "none"] = "gated"
    attention: Literal["heads", "gated", "latent", "none"] = "heads"  # gated: q has gates, too
    tables: tuple[str, ...] = (ROPE_FREQS,)  # tensors that become settings, not parameters
    partly_rotated: bool = False  # only the first dimensions of a head rotate
    truncates_yarn: bool = True  # whether its YaRN rounds the dimensions between which it blends


def biases(metadata: Metadata) -> dict[str, Any]:
    return {
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": metadata.has_tensor("blk.0.ffn_gate.bias"),
    }
