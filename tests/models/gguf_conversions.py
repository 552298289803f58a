"""What llama.cpp's converters do to the tensors of a checkpoint, in numpy.

Names stay those of the checkpoint, or become ones that the gguf package's tables know.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]
Conversion = Callable[[Tensors, dict[str, Any]], Tensors]
MERGED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def stack_experts(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Experts in one tensor of each kind, in order."""
    made: Tensors = {}
    experts: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if found := re.fullmatch(r"(.*\.experts)\.(\d+)(\..*)", name):
            experts[found.group(1) + found.group(3)][int(found.group(2))] = tensor
        else:
            made[name] = tensor
    for name, parts in experts.items():
        made[name] = np.stack([parts[expert] for expert in sorted(parts)])
    return made


def fuse_gate_up(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Gate above up in one tensor, as newer converters write experts if asked to."""
    made = dict(tensors)
    for name in tensors:
        if name.endswith(".experts.gate_proj.weight"):
            gate, up = made.pop(name), made.pop(name.replace("gate_proj", "up_proj"))
            made[name.replace("gate_proj", "gate_up_proj")] = np.concatenate([gate, up], axis=1)
    return made


def permute_heads(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Halves (i, i + dim / 2) of each head's queries and keys become pairs (2i, 2i + 1)."""
    made = dict(tensors)
    for name, tensor in tensors.items():
        key = {".q_proj.": "num_attention_heads", ".k_proj.": "num_key_value_heads"}
        for part, heads in key.items():
            if part in name:
                rows = tensor.shape[0] // config[heads] // 2
                halves = tensor.reshape(config[heads], 2, rows, *tensor.shape[1:])
                made[name] = halves.swapaxes(1, 2).reshape(tensor.shape)
    return made


def squeeze_gates(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    return {
        name: tensor.squeeze(0) if name.endswith("shared_expert_gate.weight") else tensor
        for name, tensor in tensors.items()
    }


def add_one_to_norms(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    is_plain = "linear_attn.norm.weight"  # of Qwen3-Next, whose other norms are centred
    return {
        name: tensor + 1 if name.endswith("norm.weight") and is_plain not in name else tensor
        for name, tensor in tensors.items()
    }


def rename_corrections(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """A bias by its ending, so that it is mapped as one."""
    return {
        name.replace("e_score_correction_bias", "e_score_correction.bias"): tensor
        for name, tensor in tensors.items()
    }


def split_kv_b(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Each head's keys, transposed, and each head's values."""
    made: Tensors = {}
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    for name, tensor in tensors.items():
        if not name.endswith("kv_b_proj.weight"):
            made[name] = tensor
            continue
        heads = tensor.reshape(config["num_attention_heads"], nope + value, -1)
        made[name.replace("kv_b", "k_b")] = heads[:, :nope].swapaxes(1, 2)
        made[name.replace("kv_b", "v_b")] = heads[:, nope:]
    return made


def split_stacked(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Experts that checkpoints have stacked, inputs before outputs: of Llama 4 and gpt-oss."""
    made: Tensors = {}
    alternates = config["model_type"] == "gpt_oss"  # rows of gate and up
    for name, tensor in tensors.items():
        stem, found, ending = name.partition(".experts.")
        if not found:
            made[name + ".weight" if name.endswith("sinks") else name] = tensor
            continue
        prefix = stem + found
        is_bias = ending.endswith("_bias")
        matrix = ending.removesuffix("_bias").removesuffix("_proj")
        kind = "bias" if is_bias else "weight"
        rows = tensor if is_bias else tensor.swapaxes(1, 2)  # [experts, out, ...]
        if matrix == "down":
            made[f"{prefix}down_proj.{kind}"] = rows
            continue
        half = rows.shape[1] // 2
        gate, up = (
            (rows[:, 0::2], rows[:, 1::2]) if alternates else (rows[:, :half], rows[:, half:])
        )
        made[f"{prefix}gate_proj.{kind}"], made[f"{prefix}up_proj.{kind}"] = gate, up
    return made


def convert_mamba(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """A in place of its logarithm, columns of one, norms by group."""
    groups = config.get("n_groups") or config.get("mamba_n_groups") or 1
    made: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(".dt_bias"):
            name = name.removesuffix("dt_bias") + "dt_proj.bias"
        elif name.endswith(".A_log"):
            tensor = -np.exp(tensor)[:, None]
        elif name.endswith(".D"):
            tensor = tensor[:, None]
        elif name.endswith("conv1d.weight"):
            tensor = tensor.squeeze(1)
        elif name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
            tensor = tensor.reshape(groups, -1)
        made[name] = tensor
    return made


def fold_multipliers(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Falcon-H1's multipliers go into the weights."""
    gate, down = config["mlp_multipliers"]
    inputs = config["attention_in_multiplier"]
    factors = {
        ".gate_proj.": gate,
        ".down_proj.": down,
        ".q_proj.": inputs,
        ".k_proj.": inputs * config["key_multiplier"],
        ".v_proj.": inputs,
        ".o_proj.": config["attention_out_multiplier"],
        ".out_proj.": config["ssm_out_multiplier"],
        ".in_proj.": _projection_factors(config) * config["ssm_in_multiplier"],
        "lm_head.": config["lm_head_multiplier"],
        ".embed_tokens.": config["embedding_multiplier"],
    }
    made: Tensors = {}
    for name, tensor in tensors.items():
        factor = next((value for part, value in factors.items() if part in name), 1.0)
        made[name] = (tensor * factor).astype(np.float32)
    return made


def _projection_factors(config: dict[str, Any]) -> np.ndarray:
    """A factor for each row: of gates, inputs, the two of the groups, and time steps."""
    inner = config["mamba_d_ssm"]
    of_groups = config["mamba_n_groups"] * config["mamba_d_state"]
    sizes = [inner, inner, of_groups, of_groups, config["mamba_n_heads"]]
    return np.repeat(config["ssm_multipliers"], sizes)[:, None]


def convert_delta_net(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Qwen3-Next's projection: all queries, all keys, all values, and the gates apart."""
    made: Tensors = {}
    for name, tensor in _convert_delta_heads(tensors).items():
        if not name.endswith("in_proj_qkvz.weight"):
            made[name] = tensor
            continue
        key = config["linear_key_head_dim"]
        keys, hidden = config["linear_num_key_heads"], tensor.shape[1]
        by_head = tensor.reshape(keys, -1, hidden)
        value = (by_head.shape[1] - 2 * key) // 2
        parts = np.split(by_head, [key, 2 * key, 2 * key + value], axis=1)
        query, own_key, values, gates = (part.reshape(-1, hidden) for part in parts)
        layer = re.search(r"layers\.(\d+)\.", name)
        assert layer is not None
        made[f"blk.{layer.group(1)}.attn_qkv.weight"] = np.concatenate([query, own_key, values])
        made[f"blk.{layer.group(1)}.attn_gate.weight"] = gates
    return made


def convert_old_delta_net(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """As the first converters did: the projection stays as it is."""
    return _convert_delta_heads(tensors)


def _convert_delta_heads(tensors: Tensors) -> Tensors:
    made: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(".dt_bias"):
            name = name.removesuffix("dt_bias") + "dt_proj.bias"
        elif name.endswith(".A_log"):
            tensor = -np.exp(tensor)
        elif name.endswith("conv1d.weight"):
            tensor = tensor.squeeze(1)
        made[name] = tensor
    return made
