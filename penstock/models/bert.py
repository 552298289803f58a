"""BERT, RoBERTa, XLM-RoBERTa and DistilBERT: learned positions, post-norm layers."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from penstock.layers.build import Build
from penstock.models.config import check_fixed, read_float, read_int
from penstock.models.encoder import EncoderHead, EncoderModel
from penstock.ops.blocks import Weight
from penstock.protocol.errors import ModelError

logger = logging.getLogger(__name__)


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
        check_fixed(raw, position_embedding_type="absolute")
        return {"type_vocab_size": 2, **raw}


# Names of flash-attn's BERT, which Jina's repositories use.
FLASH_NAMES = {
    r"^encoder\.layers\.": "layers.",
    r"^emb_ln\.": "embeddings.LayerNorm.",
    r"\.mixer\.Wqkv\.": ".self_attn.qkv_proj.",
    r"\.mixer\.out_proj\.": ".self_attn.o_proj.",
    r"\.mlp\.fc1\.": ".mlp.up_proj.",
    r"\.mlp\.fc2\.": ".mlp.down_proj.",
    r"\.norm1\.": ".post_attention_layernorm.",
    r"\.norm2\.": ".post_mlp_layernorm.",
}


class RobertaModel(BertModel):
    """Positions start after the padding token's, and the head has a dense layer of its own."""

    prefix = r"(roberta|xlm_roberta)\."
    renamed = {**BertModel.renamed, **FLASH_NAMES}

    @classmethod
    def create(cls, build: Build, raw: Mapping[str, Any]) -> EncoderModel:
        is_rotary = raw.get("position_embedding_type") == "rotary"
        return super(RobertaModel, JinaEmbeddingsV3Model if is_rotary else cls).create(build, raw)

    def first_position(self) -> int:
        return read_int(self.config.raw, "pad_token_id", 1, low=0) + 1

    def head_names(self) -> Mapping[str, str]:
        by_token = self.classifier is not None and self.classifier.pooling == "ALL"
        return super().head_names() if by_token else {}


class JinaEmbeddingsV3Model(RobertaModel):
    """XLM-RoBERTa with rotary positions, as Jina or transformers saves it.

    Jina's checkpoint has LoRA adapters for several tasks. That of `default_task` in config.json is
    merged into the weights; without it, none is, as in Jina's code.
    """

    is_rotary = True
    renamed = FLASH_NAMES

    @classmethod
    def settings(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        for key in ("rotary_emb_interleaved", "rotary_emb_scale_base", "rotary_emb_dim"):
            if raw.get(key):
                raise ModelError(f"config.json: {key}={raw[key]!r:.80} is not supported")
        is_jinas = raw.get("position_embedding_type") == "rotary"
        theta = read_float(raw, "rotary_emb_base", 10_000.0) if is_jinas else 20_000.0
        return {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "rope_theta": theta, **raw}

    def convert(self, tensors: Iterable[tuple[str, Weight]]) -> Iterable[tuple[str, Weight]]:
        task = self._task()
        found: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)  # by layer
        for name, tensor in tensors:
            layer, is_adapted, part = name.partition(".parametrizations.weight.")
            if not is_adapted:
                yield name, tensor
            elif task is None:
                if part == "original":
                    yield f"{layer}.weight", tensor
            else:
                assert isinstance(tensor, torch.Tensor), "GGUF files of it do not exist"
                found[layer][part] = tensor
                if len(found[layer]) == 3:
                    yield f"{layer}.weight", self._merge(layer, task, found.pop(layer))

    def _task(self) -> int | None:
        """The number of the adapter to use."""
        names, task = self.config.raw.get("lora_adaptations"), self.config.raw.get("default_task")
        if not isinstance(names, list) or not names:
            return None
        if task is None:
            logger.warning(
                "The model has adapters for %s, of which none is used: choose one with "
                '--hf-overrides \'{"default_task": "%s"}\'',
                ", ".join(map(str, names)),
                names[-1],
            )
            return None
        if task not in names:
            raise ModelError(
                f"config.json: default_task must be one of {', '.join(map(str, names))}, got "
                f"{task!r:.80}"
            )
        return names.index(task)

    def _merge(self, layer: str, task: int, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        original = parts["original"]
        a, b = (parts[f"0.{name}"][task].float() for name in ("lora_A", "lora_B"))
        change = a @ b if layer.endswith("_embeddings") else b @ a
        raw = self.config.raw
        scale = read_float(raw, "lora_alpha", 1.0) / read_int(raw, "lora_rank", 4)
        return (original.float() + change * scale).to(original.dtype)


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
