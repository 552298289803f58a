"""nomic-bert and Alibaba's GTE ("new" BERT): BERT's post-norm layers, rotary and gated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from penstock.models.config import check_fixed, read_float
from penstock.models.encoder import EncoderModel
from penstock.ops.blocks import Weight
from penstock.protocol.errors import ModelError


class NomicBertModel(EncoderModel):
    is_rotary = is_gated = True
    attention_bias = up_bias = down_bias = False
    prefix = r"(nomic_bert|bert)\."
    renamed = {
        r"^encoder\.layers\.": "layers.",
        r"^emb_ln\.": "embeddings.LayerNorm.",
        r"\.attn\.Wqkv\.": ".self_attn.qkv_proj.",
        r"\.attn\.out_proj\.": ".self_attn.o_proj.",
        r"\.mlp\.fc12\.": ".mlp.gate_proj.",
        r"\.mlp\.fc11\.": ".mlp.up_proj.",
        r"\.mlp\.fc2\.": ".mlp.down_proj.",
        r"\.norm1\.": ".post_attention_layernorm.",
        r"\.norm2\.": ".post_mlp_layernorm.",
    }

    @classmethod
    def settings(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        if "n_embd" not in raw:
            return {"hidden_act": "silu", "type_vocab_size": 2, "rope_theta": 1000.0, **raw}
        # Setting names in nomic's own files.
        check_fixed(
            raw,
            activation_function="swiglu",
            prenorm=False,
            parallel_block=False,
            causal=False,
            use_rms_norm=False,
            qkv_proj_bias=False,
            mlp_fc1_bias=False,
            mlp_fc2_bias=False,
            rotary_emb_interleaved=False,
            rotary_emb_fraction=1.0,
            rotary_emb_scale_base=None,
        )
        return {
            **raw,
            "hidden_size": raw["n_embd"],
            "intermediate_size": raw.get("n_inner", 4 * int(raw["n_embd"])),
            "num_hidden_layers": raw.get("n_layer"),
            "num_attention_heads": raw.get("n_head"),
            "max_position_embeddings": raw.get("n_positions", 2048),
            "layer_norm_eps": read_float(raw, "layer_norm_epsilon", 1e-12),
            "hidden_act": "silu",
            "rope_theta": read_float(raw, "rotary_emb_base", 10_000.0),
        }


class GteModel(EncoderModel):
    is_rotary = is_gated = True
    up_bias = False
    pooling = "CLS"
    prefix = r"(new|gte)\."
    renamed = {
        r"^encoder\.layer\.": "layers.",
        r"\.attention\.(qkv_proj|o_proj)\.": r".self_attn.\1.",
        r"\.attn_ln\.": ".post_attention_layernorm.",
        r"\.mlp_ln\.": ".post_mlp_layernorm.",
    }

    @classmethod
    def settings(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        check_fixed(
            raw,
            position_embedding_type="rope",
            layer_norm_type="layer_norm",
            logn_attention_scale=False,
        )
        scaling = raw.get("rope_scaling")
        if isinstance(scaling, Mapping) and scaling.get("mixed_b") is not None:
            raise ModelError("config.json: mixed_b in rope_scaling is not supported")
        theta = 10_000.0 if raw.get("model_type") == "new" else 160_000.0
        return {"type_vocab_size": 0, "rope_theta": theta, **raw}

    def convert(self, tensors: Iterable[tuple[str, Weight]]) -> Iterable[tuple[str, Weight]]:
        """Split the fused MLP projection. Its files store the gate after up."""
        for name, tensor in tensors:
            if ".mlp.up_gate_proj." not in name:
                yield name, tensor
                continue
            assert isinstance(tensor, torch.Tensor), "GGUF files of it do not exist"
            up, gate = tensor.chunk(2)
            yield name.replace("up_gate_proj", "up_proj"), up
            yield name.replace("up_gate_proj", "gate_proj"), gate
