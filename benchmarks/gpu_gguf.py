"""GGUF matmuls on a GPU by type and shape, and random GGUF files to time an engine with.

python benchmarks/gpu_gguf.py compile PART PARTS   fill Triton's cache for `tune`, several at once
python benchmarks/gpu_gguf.py tune [TYPE...]       one row over many configurations
python benchmarks/gpu_gguf.py layer [TYPE...]      the matmuls of Qwen3-8B as configured
python benchmarks/gpu_gguf.py floats [TYPE...]     the same, always dequantized for cuBLAS
python benchmarks/gpu_gguf.py write CONFIG OUT [TYPE]   write a file of random blocks; needs gguf

CONFIG is a folder with a Qwen3 or Llama config.json. Without TYPE, the types are those of Q4_K_M.
Times are medians of calls captured in a graph. Each call uses a different weight.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_micro import time_each_us as time_us

from penstock.loading.gguf.file import GGML_TYPES
from penstock.ops.blocks import BlockTensor
from penstock.ops.triton import gguf as kernels
from penstock.ops.triton.gguf_layout import LAYOUTS, Planes, prepare_gguf
from penstock.ops.triton.gguf_row import can_multiply, tensor_rows
from penstock.ops.triton.linear import linear
from penstock.ops.triton.slabs import multiply_slabs
from penstock.ops.triton.tuning import Launch
from penstock.ops.triton.tuning_gguf import RowPlan, TensorPlan

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
ROWS = (1, 2, 4, 5, 6, 8, 16, 32, 64, 128, 256, 512)
# Where blocks have float16 scales, and scales that give numbers near 0.02.
SCALES = {"Q4_K": ((0, 8e-5), (2, 6e-4)), "Q6_K": ((208, 1.5e-5),), "Q4_1": ((0, 4e-3), (2, -0.03))}
MIXTURE = ["Q4_K", "Q6_K"]  # llama.cpp calls it Q4_K_M


def random_blocks(type_name: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """[rows, bytes of a row] uint8."""
    own = next(one for one in GGML_TYPES.values() if one.name == type_name)
    count = rows * columns // own.block_size
    blocks = np.random.default_rng(seed).integers(0, 256, (count, own.block_bytes), np.uint8)
    for offset, scale in SCALES.get(type_name, ((0, 1e-3),)):
        blocks[:, offset : offset + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return blocks.reshape(rows, -1)


# -- matmuls


class Weights:
    """Enough matrices of one shape that none is still in the GPU's cache when it is used again."""

    def __init__(self, type_name: str, shape: tuple[int, int], several: bool = True) -> None:
        own = next(one for one in GGML_TYPES.values() if one.name == type_name)
        blocks = BlockTensor(*own, torch.from_numpy(random_blocks(type_name, *shape)))
        first = prepare_gguf(blocks, torch.device("cuda"))
        held = sum(tensor.nbytes for tensor in first.tensors().values())
        self.nbytes = held
        self.all = [first]
        for _ in range(int(150e6 // held) + 1 if several else 0):
            copies: dict[str, Any] = {k: tensor.clone() for k, tensor in first.tensors().items()}
            self.all.append(first._replace(**copies))


def variants(type_name: str, shape: tuple[int, int]) -> list[RowPlan] | list[TensorPlan]:
    """Configurations of one row with a matrix of this shape."""
    if not can_multiply(LAYOUTS[type_name], torch.bfloat16):
        return row_variants(shape)
    blocks = shape[1] // (8 * LAYOUTS[type_name].group)
    several = ((4, 1, 80), (8, 1, 80), (8, 1, 96), (4, 2, 96), (8, 2, 128))
    found = [TensorPlan(*own) for own in several]
    return [plan for plan in found if blocks % (plan.warps * plan.turns) == 0]


def row_variants(shape: tuple[int, int]) -> list[RowPlan]:
    found = []
    for (quads, warps), steps in itertools.product(
        ((64, 2), (128, 2), (128, 4), (256, 8)), (1, 2, 3, 4, 8)
    ):
        is_whole = shape[1] // 32 <= quads
        if is_whole and quads > 128:  # some of it for nothing
            continue
        if (steps == 1 or is_whole) and shape[0] // (4 * steps) >= 200:
            found.append(RowPlan(quads, steps, Launch(warps, 3)))
    return found


def compile_part(part: int, parts: int, types: list[str]) -> None:
    """Fill Triton's cache with every `parts`th variant, so that `tune` need not compile."""
    for type_name, shape in itertools.product(types, SHAPES.values()):
        own = variants(type_name, shape)[part::parts]
        if not own:
            continue
        weight = Weights(type_name, shape, False).all[0]
        x = torch.randn(1, shape[1], device="cuda", dtype=torch.bfloat16)
        for plan in own:
            _one_row(x, weight, x.new_empty(1, shape[0]), plan)


def tune(types: list[str]) -> None:
    """The best configurations of one row for each type and shape."""
    for type_name, (name, shape) in itertools.product(types, SHAPES.items()):
        weights = Weights(type_name, shape)
        x = torch.randn(1, shape[1], device="cuda", dtype=torch.bfloat16)
        out = torch.empty(1, shape[0], device="cuda", dtype=torch.bfloat16)
        found = []
        for plan in variants(type_name, shape):
            call = functools.partial(_nth_row, x, weights, out, plan)
            found.append((time_us(call, len(weights.all)), plan))
        print(type_name, name, f"{weights.nbytes / 1e6:.1f} MB")
        for micros, plan in sorted(found):
            tera = weights.nbytes / micros / 1e6
            print(f"  {micros:7.2f} us {tera:.2f} TB/s {tuple(plan)}", flush=True)


def _nth_row(
    x: torch.Tensor, weights: Weights, out: torch.Tensor, plan: RowPlan | TensorPlan, index: int
) -> object:
    return _one_row(x, weights.all[index], out, plan)


def _one_row(
    x: torch.Tensor, weight: Planes, out: torch.Tensor, plan: RowPlan | TensorPlan
) -> torch.Tensor:
    if isinstance(plan, TensorPlan):
        return tensor_rows(x, weight, None, out, plan)
    return kernels.single_rows(x, weight, None, out, plan)


def layer(types: list[str]) -> None:
    """A table of times, by rows of x."""
    print("| product | type |", " | ".join(str(n) for n in ROWS), "|")
    for name, shape in SHAPES.items():
        dense = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        many = [dense.clone() for _ in range(4)]
        micros = [time_us(_dense_call(many, n), 4) for n in ROWS]
        print(f"| {name} | bfloat16 |", " | ".join(f"{one:.1f}" for one in micros), "|")
        del many
        for type_name in types:
            weights = Weights(type_name, shape)
            micros = []
            for n in ROWS:
                x = torch.randn(n, shape[1], device="cuda", dtype=torch.bfloat16)

                def call(index: int, x: torch.Tensor = x, weights: Weights = weights) -> object:
                    return kernels.gguf_linear(x, weights.all[index], None)

                micros.append(time_us(call, len(weights.all)))
            shown = " | ".join(f"{one:.1f}" for one in micros)
            print(f"| {name} | {type_name} | {shown} |", flush=True)


def floats(types: list[str]) -> None:
    """A table of times by rows of x, with the matrix always dequantized for cuBLAS."""
    print("| product | type |", " | ".join(str(n) for n in ROWS), "|")
    for (name, shape), type_name in itertools.product(SHAPES.items(), types):
        weights = Weights(type_name, shape)
        micros = [time_us(_floats_call(weights, n), len(weights.all)) for n in ROWS]
        shown = " | ".join(f"{one:.1f}" for one in micros)
        print(f"| {name} | {type_name} | {shown} |", flush=True)


def _floats_call(weights: Weights, n: int) -> Callable[[int], object]:
    out_features, in_features = weights.all[0].shape
    x = torch.randn(n, in_features, device="cuda", dtype=torch.bfloat16)
    out = x.new_empty(n, out_features)

    def call(index: int) -> object:
        own = weights.all[index]
        return multiply_slabs(
            x, lambda start, end: kernels.as_floats(own.rows(start, end), x.dtype), None, out
        )

    return call


def _dense_call(weights: list[torch.Tensor], n: int) -> Callable[[int], object]:
    x = torch.randn(n, weights[0].shape[1], device="cuda", dtype=torch.bfloat16)
    return lambda index: linear(x, weights[index], None)


# -- a file


def write(config_folder: Path, out: Path, only: str | None = None) -> None:
    """A GGUF file of this model's shapes: Q4_K, with Q6_K where Q4_K_M has it; or of one type."""
    import gguf

    config = json.loads((config_folder / "config.json").read_text())
    arch = config["model_type"]
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, ffn = config.get("head_dim", hidden // heads), config["intermediate_size"]
    writer = gguf.GGUFWriter(out, arch)
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    made: dict[tuple[str, int, int], np.ndarray] = {}

    def add(name: str, type_name: str, rows: int, columns: int) -> None:
        type_name = only or type_name
        key = (type_name, rows, columns)
        if key not in made:
            made[key] = random_blocks(*key)
        quant = gguf.GGMLQuantizationType[type_name]
        writer.add_tensor(f"{name}.weight", made[key], raw_dtype=quant)

    ones = np.ones(hidden, np.float32)
    add("token_embd", "Q4_K", config["vocab_size"], hidden)
    for n in range(layers):
        more = "Q6_K" if n < layers // 8 or n >= 7 * layers // 8 or n % 3 == 2 else "Q4_K"
        add(f"blk.{n}.attn_q", "Q4_K", heads * head_dim, hidden)
        add(f"blk.{n}.attn_k", "Q4_K", kv_heads * head_dim, hidden)
        add(f"blk.{n}.attn_v", more, kv_heads * head_dim, hidden)
        add(f"blk.{n}.attn_output", "Q4_K", hidden, heads * head_dim)
        add(f"blk.{n}.ffn_gate", "Q4_K", ffn, hidden)
        add(f"blk.{n}.ffn_up", "Q4_K", ffn, hidden)
        add(f"blk.{n}.ffn_down", more, hidden, ffn)
        writer.add_tensor(f"blk.{n}.attn_norm.weight", ones)
        writer.add_tensor(f"blk.{n}.ffn_norm.weight", ones)
        if arch == "qwen3":
            writer.add_tensor(f"blk.{n}.attn_q_norm.weight", ones[:head_dim])
            writer.add_tensor(f"blk.{n}.attn_k_norm.weight", ones[:head_dim])
    writer.add_tensor("output_norm.weight", ones)
    if not config.get("tie_word_embeddings"):
        add("output", "Q6_K", config["vocab_size"], hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{out}: {out.stat().st_size / 2**30:.2f} GiB")


def main() -> None:
    command, *rest = sys.argv[1:]
    if command == "write":
        write(Path(rest[0]), Path(rest[1]), *rest[2:])
    elif command == "compile":
        compile_part(int(rest[0]), int(rest[1]), rest[2:] or MIXTURE)
    elif command == "tune":
        tune(rest or MIXTURE)
    else:
        {"layer": layer, "floats": floats}[command](rest or MIXTURE)


if __name__ == "__main__":
    main()
