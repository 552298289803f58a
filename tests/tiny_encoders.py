"""Tiny random checkpoints of every encoder, made with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

COMMON = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "pad_token_id": 0,
}
DISTILBERT = {
    **{key: COMMON[key] for key in ("vocab_size", "max_position_embeddings", "initializer_range")},
    "dim": 64,
    "hidden_dim": 112,
    "n_layers": 4,
    "n_heads": 4,
    "pad_token_id": 0,
}
MODERNBERT = {
    **COMMON,
    "local_attention": 16,  # which most prompts are longer than
    "global_attn_every_n_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "classifier_pooling": "mean",
    "classifier_activation": "silu",
}
ROPE = {"rope_type": "default", "rope_theta": 500.0}

# What transformers' classes begin with, and the settings.
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {**COMMON, "type_vocab_size": 2}),
    "bert_tanh": ("Bert", {**COMMON, "hidden_act": "gelu_new", "hidden_size": 48}),
    "roberta": ("Roberta", {**COMMON, "type_vocab_size": 1, "pad_token_id": 1}),
    "xlm_roberta": ("XLMRoberta", {**COMMON, "type_vocab_size": 1, "pad_token_id": 3}),
    "jina_v3": ("JinaEmbeddingsV3", {**COMMON, "type_vocab_size": 1, "rope_parameters": ROPE}),
    "distilbert": ("DistilBert", DISTILBERT),
    "modernbert": ("ModernBert", MODERNBERT),
    "modernbert_biased": (
        "ModernBert",
        {
            **MODERNBERT,
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "classifier_bias": True,
            "classifier_pooling": "cls",
        },
    ),
    "nomic_bert": ("NomicBert", {**COMMON, "rope_parameters": ROPE}),
    "gte": ("Gte", {**COMMON, "type_vocab_size": 2, "rope_parameters": ROPE}),
}
# Decoders that see both ways, without a head.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "embedding_gemma": (
        "Gemma3Text",
        {
            **COMMON,
            "head_dim": 16,
            "num_key_value_heads": 2,
            "query_pre_attn_scalar": 24,
            "use_bidirectional_attention": True,
            "sliding_window": 17,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
}


def make_encoder(folder: Path, variant: str, head: str = "Model", num_labels: int = 3) -> Any:
    """Write a random checkpoint with this head into the folder; transformers' model of it."""
    import transformers

    name, settings = (ENCODERS | DECODERS)[variant]
    if head != "Model":
        settings = {**settings, "num_labels": num_labels}
    config = getattr(transformers, f"{name}Config")(**settings)
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}{head}")(config).float().eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):  # transformers starts them at zero, which tests nothing
            torch.nn.init.normal_(parameter, std=0.25)
        elif parameter.dim() == 1:  # and norms at one
            torch.nn.init.normal_(parameter, mean=1.0, std=0.25)
    model.save_pretrained(folder)
    return model
