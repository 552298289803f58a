"""Matmuls with quantized weights on a GPU, in the shapes of Qwen3-8B, over many configurations.

python benchmarks/gpu_quantized.py compile PART PARTS   fill Triton's cache, several at once
python benchmarks/gpu_quantized.py tune [NAME...]       find the best configurations of each matmul
python benchmarks/gpu_quantized.py layer                time a decoder layer's matmuls as configured

Times are medians of calls captured in a graph. Each call uses a different weight.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from gpu_micro import time_each_us as time_us

from penstock.ops import quantized as plain
from penstock.ops.triton import fp8, linear, packed, packed_layout, w4_row
from penstock.ops.triton.tuning import Launch, RowTile
from penstock.ops.triton.tuning_quantized import Fp8Plan, TilePlan

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
GROUP = 128
Call = Callable[[int], object]  # with the number of a weight


class Weights:
    """Enough matrices of one shape that none is still in the GPU's cache when it is used again."""

    def __init__(self, name: str) -> None:
        self.out, self.size = SHAPES[name]
        self.count = int(400e6 // (self.out * self.size)) + 2
        dense = torch.randn(self.out, self.size, device="cuda", dtype=torch.bfloat16) * 0.02
        numbers, scale = plain.quantize_fp8_by_row(dense)
        self.fp8 = [numbers.clone() for _ in range(self.count)]
        self.scale = scale
        blocks, self.block_scale = plain.quantize_fp8_by_block(dense)
        self.blocks = blocks
        words = torch.randint(-(2**15), 2**15 - 1, (self.out, self.size // 4), device="cuda")
        self.w4 = [words.short() for _ in range(self.count * 2)]
        self.w4_scales = torch.rand(self.out, self.size // GROUP, device="cuda").bfloat16() * 0.01
        self.w4_zeros = torch.full_like(self.w4_scales, 7).to(torch.uint8)

    def packed(self, index: int) -> packed_layout.Packed:
        return packed_layout.Packed(self.w4[index], self.w4_scales, None, GROUP)

    def x(self, num_tokens: int) -> torch.Tensor:
        return torch.randn(num_tokens, self.size, device="cuda", dtype=torch.bfloat16)


Variant = tuple[str, Any, Call, int]  # what it is for, its configuration


def fp8_rows(weights: Weights) -> Iterator[Variant]:
    x = weights.x(1)
    for rows, columns, warps, span in itertools.product(
        (2, 4, 8), (1024, 2048, 4096), (1, 2, 4, 8), (1, 16)
    ):
        held = rows * columns / (warps * 32)
        if not 64 <= held <= (64 if span == 1 else 256):
            continue
        tile = RowTile(rows, columns, Launch(warps, 3))

        def call(index: int, tile: RowTile = tile, span: int = span) -> object:
            return fp8.one_row(x, weights.fp8[index], weights.scale, None, tile, span)

        yield "fp8 1", (tile, span), call, weights.count


def fp8_tiles(weights: Weights, num_tokens: int) -> Iterator[Variant]:
    x = weights.x(num_tokens)
    tokens = max(triton.next_power_of_2(num_tokens), 16)
    for rows, depth, splits, stages, precise in itertools.product(
        (64, 128), (128, 256), (1, 2, 4), (4, 6), (True, False)
    ):
        if not precise and (rows, stages) != (64, 6):
            continue
        programs = weights.out // rows * splits
        if not 64 <= programs <= 800 or (rows + tokens) * depth * stages > 220_000:
            continue
        plan = Fp8Plan(rows, tokens, depth, splits, True, precise, Launch(4, stages))

        def call(index: int, plan: Fp8Plan = plan) -> object:
            return fp8.run_tiles(x, weights.fp8[index], weights.scale, None, None, plan)

        yield f"fp8 {num_tokens}", plan, call, weights.count
    if num_tokens == 64:
        for splits, precise in (1, False), (2, False), (1, True), (2, True):
            plan = Fp8Plan(128, 64, 128, splits, False, precise, Launch(4, 4))

            def call(index: int, plan: Fp8Plan = plan) -> object:
                return fp8.run_tiles(x, weights.fp8[index], weights.scale, None, None, plan)

            yield f"fp8 {num_tokens}", plan, call, weights.count


def w4_rows(weights: Weights) -> Iterator[Variant]:
    x = weights.x(1)
    for warps in 1, 2, 4, 8:

        def call(index: int, warps: int = warps) -> object:
            return w4_row.one_row(x, weights.packed(index), None, warps)

        yield "w4 1", warps, call, 2 * weights.count


def w4_tiles(weights: Weights, num_tokens: int) -> Iterator[Variant]:
    x = weights.x(num_tokens)
    tokens = max(triton.next_power_of_2(num_tokens), 16)
    for rows, splits, warps, stages in itertools.product((64, 128), (1, 2, 4), (4, 8), (2, 3, 4)):
        if not 64 <= weights.out // rows * splits <= 800 or rows < 16 * warps:
            continue
        plan = TilePlan(rows, tokens, splits, Launch(warps, stages))

        def call(index: int, plan: TilePlan = plan) -> object:
            return packed.run_tiles(x, weights.packed(index), None, plan)

        yield f"w4 {num_tokens}", plan, call, 2 * weights.count


def variants(name: str) -> Iterator[Variant]:
    weights = Weights(name)
    yield from fp8_rows(weights)
    yield from w4_rows(weights)
    for num_tokens in 8, 64:
        yield from fp8_tiles(weights, num_tokens)
    for num_tokens in 16, 32, 64, 128:
        yield from w4_tiles(weights, num_tokens)


def compile_part(part: int, parts: int) -> None:
    """Every `parts`-th variant once; a shape decides on few variants of the machine code."""
    done = 0
    for name in SHAPES:
        for index, (kind, config, call, _) in enumerate(variants(name)):
            if index % parts == part:
                try:
                    call(0)
                    done += 1
                except Exception as error:  # a configuration that does not fit is left out
                    print(name, kind, config, type(error).__name__, str(error)[:200])
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    print(f"part {part}: {done}")


def tune(names: list[str]) -> None:
    for name in names or SHAPES:
        found: dict[str, list[tuple[float, Any]]] = {}
        size = SHAPES[name][0] * SHAPES[name][1]
        for kind, config, call, count in variants(name):
            try:
                found.setdefault(kind, []).append((time_us(call, count), config))
            except Exception as error:
                print(name, kind, config, type(error).__name__, str(error)[:100])
        for kind, timed in found.items():
            timed.sort(key=lambda pair: pair[0])
            bytes_ = size if kind.startswith("fp8") else size / 2
            print(f"{name} {kind}")
            for us, config in timed[:4]:
                print(f"  {us:7.2f} us {bytes_ / us / 1e6:5.2f} TB/s  {_short(config)}")
        torch.cuda.empty_cache()


def _short(config: Any) -> str:
    return str(config).replace("Launch", "").replace("num_", "")


def products(weights: Weights, dense: list[torch.Tensor], n: int) -> dict[str, Call]:
    """Every matmul of n rows as configured, and those it is compared with."""
    x = weights.x(n)
    rounded, scales, _ = fp8.quantize(x, None, False)

    def scaled(index: int) -> object:
        return torch._scaled_mm(
            rounded, weights.fp8[index].t(), scale_a=scales[:, None],
            scale_b=weights.scale[None, :], out_dtype=torch.bfloat16, use_fast_accum=True,
        )  # fmt: skip

    def w4_linear(index: int, zeros: torch.Tensor | None = None) -> object:
        return packed.w4_linear(x, weights.w4[index], weights.w4_scales, zeros, GROUP, None)

    return {
        "bf16": lambda i: linear.linear(x, dense[i % len(dense)], None),
        "fp8": lambda i: fp8.fp8_linear(x, weights.fp8[i], weights.scale, None, None),
        "scaled_mm": scaled,
        "quantize": lambda i: fp8.quantize(x, None, False),
        "block": lambda i: fp8.fp8_linear(x, weights.fp8[i], weights.block_scale, None, None),
        "w4": w4_linear,
        "w4 zeros": lambda i: w4_linear(i, weights.w4_zeros),
    }


def layer() -> None:
    """Times in us of the four matmuls as configured, and of those they are compared with."""
    for name in SHAPES:
        weights = Weights(name)
        dense = [
            torch.randn(weights.out, weights.size, device="cuda", dtype=torch.bfloat16)
            for _ in range(weights.count // 2 + 1)
        ]
        for n in 1, 2, 16, 64, 128, 256, 512, 2048, 8192:
            count = weights.count if n <= 512 else 3
            times = []
            for kind, call in products(weights, dense, n).items():
                try:
                    times.append(f"{kind} {time_us(call, count):.1f}")
                except Exception as error:  # the others are still worth their time
                    times.append(f"{kind} {type(error).__name__} {str(error)[:60]}")
            print(f"{name} {n}: " + ", ".join(times), flush=True)
        del dense, weights
        torch.cuda.empty_cache()


def main() -> None:
    torch.manual_seed(0)
    command, *rest = sys.argv[1:]
    if command == "compile":
        compile_part(int(rest[0]), int(rest[1]))
    elif command == "tune":
        tune(rest)
    else:
        layer()


if __name__ == "__main__":
    main()
