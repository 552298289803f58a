"""Tiny GGUF models, written by the gguf package: a second opinion on the format."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB, CONTEXT = 256, 256, 4, 2, 64, 2, 40, 128
QUANTIZABLE = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
# gguf can read these, but not make all of them
K_TYPES = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
OTHER_TYPES = ["IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4", "Q1_0", "TQ1_0", "TQ2_0"]
GRID_TYPES = ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"]
# Where a block's float16 scales lie; everything else in a block may be any byte.
SCALE_OFFSETS = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,)}
SCALE_OFFSETS |= {"Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,)}
SCALE_OFFSETS |= {"IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (), "TQ1_0": (52,), "TQ2_0": (64,)}
SCALE_OFFSETS |= {"NVFP4": (), "Q1_0": (0,)}
SCALE_OFFSETS |= {name: () if name == "IQ1_M" else (0,) for name in GRID_TYPES}


def random_blocks(
    rng: np.random.Generator, type_name: str, rows: int, columns: int, scale: float = 1.0
) -> np.ndarray:
    """Random bytes whose scales (or floats) are finite: [rows, bytes of a row] uint8."""
    quant = gguf.GGMLQuantizationType[type_name]
    if type_name in ("F32", "F16", "BF16"):
        floats = rng.standard_normal((rows, columns), dtype=np.float32)
        return gguf.quants.quantize(floats, quant).reshape(rows, -1).view(np.uint8)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[quant]
    count = rows * columns // block_size
    blocks = rng.integers(0, 256, (count, block_bytes), dtype=np.uint8)
    for offset in SCALE_OFFSETS[type_name]:
        scales = (rng.standard_normal((count, 1)) * scale).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8)
    if type_name == "MXFP4":  # a power of two between 1 / 64 and 4
        blocks[:, 0] = rng.integers(121, 130, count)
    if type_name == "IQ1_M":  # four bits of the float16 on top of each of the last four pairs
        half = (rng.standard_normal((count, 1)) * scale).astype(np.float16).view(np.uint16)
        quarters = ((half >> np.arange(0, 16, 4, dtype=np.uint16)) & 15).astype(np.uint8)
        blocks[:, 49::2] = (blocks[:, 49::2] & 15) | (quarters << 4)
    return blocks.reshape(rows, -1)


def reference_floats(data: np.ndarray, type_name: str) -> np.ndarray:
    """What the gguf package says that blocks stand for; it cannot read Q1_0."""
    if type_name != "Q1_0":
        return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[type_name])
    blocks = data.reshape(-1, 18)
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    signs = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(np.float32) * 2 - 1
    return (signs * scales).reshape(len(data), -1)


def permute_rope(weight: np.ndarray, heads: int) -> np.ndarray:
    """What converters do to llama's q and k: halves (i, i + dim / 2) become pairs (2i, 2i + 1)."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def tensor_shapes(arch: str, tied: bool = True) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN)}
    for n in range(LAYERS):
        layer = {
            "attn_norm.weight": (HIDDEN,),
            "attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_norm.weight": (HIDDEN,),
            "ffn_gate.weight": (FFN, HIDDEN),
            "ffn_up.weight": (FFN, HIDDEN),
            "ffn_down.weight": (HIDDEN, FFN),
        }
        if arch == "qwen2":
            layer["attn_q.bias"] = (HEADS * HEAD_DIM,)
            layer["attn_k.bias"] = (KV_HEADS * HEAD_DIM,)
            layer["attn_v.bias"] = (KV_HEADS * HEAD_DIM,)
        if arch == "qwen3":
            layer["attn_q_norm.weight"] = layer["attn_k_norm.weight"] = (HEAD_DIM,)
        shapes |= {f"blk.{n}.{name}": shape for name, shape in layer.items()}
    shapes["output_norm.weight"] = (HIDDEN,)
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    return shapes


def write_gguf(
    path: Path,
    arch: str = "llama",
    type_name: str = "F32",
    *,
    types: Sequence[str] = (),
    tied: bool = True,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    seed: int = 0,
    scale: float = 1.0,
    tensors_a_file: int = 0,
) -> dict[str, np.ndarray]:
    """Write a tiny model; returns what its tensors are in float32, by GGUF name.

    `types` are those of the matrices, in turn, where they are not all of one.
    `scale` is about how large blocks' scales are, where blocks are made up.
    `metadata` replaces or adds keys (a value of None leaves the key out); `extra` adds tensors.
    With `tensors_a_file` the model is split, into files called as `path` is with numbers.
    """
    rng = np.random.default_rng(seed)
    values: dict[str, Any] = {
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": CONTEXT,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": FFN,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 500000.0,
        "tokenizer.ggml.tokens": [f"token{i}" for i in range(VOCAB)],
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.bos_token_id": 1,
        **(metadata or {}),
    }
    own_arch = values.pop("general.architecture", arch)
    writer = gguf.GGUFWriter(path, own_arch, split_max_tensors=tensors_a_file)
    for key, value in values.items():
        add_value(writer, key, value)
    floats: dict[str, np.ndarray] = {}
    in_turn = itertools.cycle(types or [type_name])
    for name, shape in tensor_shapes(arch, tied).items():
        if len(shape) == 1:
            floats[name] = rng.standard_normal(shape, dtype=np.float32)
            writer.add_tensor(name, floats[name])
            continue
        own_type = next(in_turn)
        quant = gguf.GGMLQuantizationType[own_type]
        data = random_blocks(rng, own_type, shape[0], shape[1], scale)
        floats[name] = reference_floats(data, own_type).reshape(shape)
        writer.add_tensor(name, data, raw_dtype=quant)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
        floats[name] = array
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return floats


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
