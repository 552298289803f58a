"""The tiny model of the server's tests with weights in a file.

The C++ library computes those with one order of summation whatever the batch, so that a request
replayed among other neighbours must give the same bits.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from server_process import make_tiny_model


def make_tiny_checkpoint(folder: Path) -> Path:
    """A model of one layer, its random weights and a tokenizer with a token for every byte."""
    make_tiny_model(folder)
    config = json.loads((folder / "config.json").read_text())
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer = "model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        layer + "input_layernorm.weight": (hidden,),
        layer + "post_attention_layernorm.weight": (hidden,),
        layer + "self_attn.q_proj.weight": (queries, hidden),
        layer + "self_attn.k_proj.weight": (keys, hidden),
        layer + "self_attn.v_proj.weight": (keys, hidden),
        layer + "self_attn.o_proj.weight": (hidden, queries),
        layer + "mlp.gate_proj.weight": (inner, hidden),
        layer + "mlp.up_proj.weight": (inner, hidden),
        layer + "mlp.down_proj.weight": (hidden, inner),
    }
    draw = np.random.default_rng(7)
    weights = {
        name: (1.0 + 0.1 * draw.standard_normal(shape)).astype(np.float32)
        if len(shape) == 1
        else (0.25 * draw.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors")
    return folder
