"""ModernBERT: rotary embedding, gated MLPs, pre-norm layers, windows in two of three layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.layers.build import Build
from penstock.layers.norm import LayerNorm
from penstock.models.config import layer_kind, read_float, read_int
from penstock.models.encoder import (
    FUNCTIONS,
    EncoderHead,
    EncoderLayer,
    EncoderMLP,
    EncoderModel,
    read_activation,
)
from penstock.protocol.errors import ModelError

WINDOWED, FULL = "sliding_attention", "full_attention"
OLD = {WINDOWED: "local_rope_theta", FULL: "global_rope_theta"}
THETAS = {WINDOWED: 10_000.0, FULL: 160_000.0}


class ModernBertModel(EncoderModel):
    is_rotary = True
    pooling = "CLS"
    prefix = r"model\."
    renamed = {
        r"^embeddings\.tok_embeddings\.": "embeddings.word_embeddings.",
        r"^embeddings\.norm\.": "embeddings.LayerNorm.",
        r"\.attn\.Wqkv\.": ".self_attn.qkv_proj.",
        r"\.attn\.Wo\.": ".self_attn.o_proj.",
        r"\.attn_norm\.": ".post_attention_layernorm.",
        r"\.mlp_norm\.": ".post_mlp_layernorm.",
        r"\.mlp\.Wi\.": ".mlp.gate_up_proj.",
        r"\.mlp\.Wo\.": ".mlp.down_proj.",
    }

    @classmethod
    def settings(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **raw,
            "hidden_act": raw.get("hidden_activation", "gelu"),
            "layer_norm_eps": read_float(raw, "norm_eps", 1e-5),
            "type_vocab_size": 0,
        }

    def norm(self, build: Build | None = None) -> LayerNorm:
        config = self.config
        bias = config.raw.get("norm_bias", False) is True
        return LayerNorm(build or self.build, config.hidden_size, config.norm_eps, bias)

    def last_norm(self) -> LayerNorm:
        return self.norm()

    def layer(self, index: int) -> EncoderLayer:
        config = self.config
        every = read_int(config.raw, "global_attn_every_n_layers", 3)
        kind = layer_kind(config, index, WINDOWED, FULL)
        kind = kind or (WINDOWED if index % every else FULL)
        reach = read_int(config.raw, "local_attention", 128) // 2 if kind == WINDOWED else None
        has_bias = config.raw.get("attention_bias", False) is True
        mlp_bias = config.raw.get("mlp_bias", False) is True
        return EncoderLayer(
            self.attention(index, has_bias, self.rotary(self._rope(kind), kind), reach),
            EncoderMLP(self.build, config, is_gated=True, up_bias=mlp_bias, down_bias=mlp_bias),
            self.norm() if index else None,
            self.norm(),
            norm_first=True,
        )

    def _rope(self, kind: str) -> Mapping[str, Any]:
        raw = self.config.raw
        given = raw.get("rope_parameters")
        own = given.get(kind) if isinstance(given, Mapping) else None
        return {"rope_parameters": own or {"rope_theta": read_float(raw, OLD[kind], THETAS[kind])}}

    def head(self, num_labels: int, by_token: bool) -> EncoderHead:
        raw = self.config.raw
        pooling = raw.get("classifier_pooling", "cls")
        if pooling not in ("cls", "mean"):
            raise ModelError(
                f"config.json: classifier_pooling must be cls or mean, got {pooling!r:.80}"
            )
        activate = FUNCTIONS[read_activation(raw, "classifier_activation")]
        return EncoderHead(
            self.build,
            self.config.hidden_size,
            num_labels,
            "ALL" if by_token else pooling.upper(),
            activate,
            dense_bias=raw.get("classifier_bias", False) is True,
            norm=self.norm(self.build.in_float32()),
        )

    def head_names(self) -> Mapping[str, str]:
        if self.classifier is None:
            return {}
        return {**super().head_names(), r"^head\.(dense|norm)\.": r"classifier.\1."}
