"""BERT, RoBERTa, XLM-RoBERTa and DistilBERT: learned positions, post-norm layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F

from penstock.models.config import read_int
from penstock.models.encoder import EncoderHead, EncoderLayer, EncoderMLP, EncoderModel
from penstock.protocol.errors import ModelError


class BertModel(EncoderModel):
    prefix = r"bert\."
    renamed = {
        r"^encoder\.layer\.": "layers.",
        r"\.attention\.self\.query\.": ".self_attn.q_proj.",
        r"\.attention\.self\.key\.": ".self_attn.k_proj.",
        r"\.attention\.self\.value\.": ".self_attn.v_proj.",
        r"\.attention\.output\.dense\.": ".self_attn.o_proj.",
        r"\.attention\.output\.LayerNorm\.": ".post_attention_layernorm.",
        r"\.intermediate\.dense\.": ".mlp.up_proj.",
        r"^(layers\.\d+)\.output\.dense\.": r"\1.mlp.down_proj.",
        r"^(layers\.\d+)\.output\.LayerNorm\.": r"\1.post_mlp_layernorm.",
        # Names in files converted from TensorFlow.
        r"(layernorm|LayerNorm)\.gamma$": r"\1.weight",
        r"(layernorm|LayerNorm)\.beta$": r"\1.bias",
    }

    @classmethod
    def settings(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        kind = raw.get("position_embedding_type", "absolute")
        if kind != "absolute":
            raise ModelError(
                f"config.json: position_embedding_type {kind!r:.80} is not supported, only absolute"
            )
        return {"type_vocab_size": 2, **raw}


class RobertaModel(BertModel):
    """Positions start after the padding token's, and the head has a dense layer of its own."""

    prefix = r"(roberta|xlm_roberta)\."

    def first_position(self) -> int:
        return read_int(self.config.raw, "pad_token_id", 1, low=0) + 1

    def head_names(self) -> Mapping[str, str]:
        by_token = self.classifier is not None and self.classifier.pooling == "ALL"
        return super().head_names() if by_token else {}


class JinaEmbeddingsV3Model(RobertaModel):
    """XLM-RoBERTa with rotary positions; no adapters, as transformers has it."""

    renamed = {
        r"^encoder\.layers\.": "layers.",
        r"^emb_ln\.": "embeddings.LayerNorm.",
        r"\.mixer\.Wqkv\.": ".self_attn.qkv_proj.",
        r"\.mixer\.out_proj\.": ".self_attn.o_proj.",
        r"\.mlp\.fc1\.": ".mlp.up_proj.",
        r"\.mlp\.fc2\.": ".mlp.down_proj.",
        r"\.norm1\.": ".post_attention_layernorm.",
        r"\.norm2\.": ".post_mlp_layernorm.",
    }

    @classmethod
    def settings(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        return {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "rope_theta": 20_000.0, **raw}

    def num_positions(self) -> int:
        return 0

    def layer(self, index: int) -> EncoderLayer:
        attention = self.attention(index, rotary=self.rotary(self.config.raw))
        return EncoderLayer(
            attention, EncoderMLP(self.build, self.config), self.norm(), self.norm()
        )


class DistilBertModel(EncoderModel):
    prefix = r"distilbert\."
    renamed = {
        r"^transformer\.layer\.": "layers.",
        r"\.attention\.q_lin\.": ".self_attn.q_proj.",
        r"\.attention\.k_lin\.": ".self_attn.k_proj.",
        r"\.attention\.v_lin\.": ".self_attn.v_proj.",
        r"\.attention\.out_lin\.": ".self_attn.o_proj.",
        r"\.sa_layer_norm\.": ".post_attention_layernorm.",
        r"\.ffn\.lin1\.": ".mlp.up_proj.",
        r"\.ffn\.lin2\.": ".mlp.down_proj.",
        r"\.output_layer_norm\.": ".post_mlp_layernorm.",
    }

    @classmethod
    def settings(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **raw,
            "hidden_size": raw.get("dim", 768),
            "intermediate_size": raw.get("hidden_dim", 3072),
            "num_hidden_layers": raw.get("n_layers", 6),
            "num_attention_heads": raw.get("n_heads", 12),
            "hidden_act": raw.get("activation", "gelu"),
            "type_vocab_size": 0,
        }

    def head(self, num_labels: int, by_token: bool) -> EncoderHead:
        return EncoderHead(
            self.build, self.config.hidden_size, num_labels, "ALL" if by_token else "CLS",
            None if by_token else F.relu,
        )  # fmt: skip

    def head_names(self) -> Mapping[str, str]:
        return {**super().head_names(), r"^pre_classifier\.": "classifier.dense."}
