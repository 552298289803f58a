"""Latent attention kernels on a GPU, with other configurations than `ops/triton/tuning.py`.

python benchmarks/gpu_latent.py [compile PART PARTS | decode prefill prompt]

`compile` builds only one of PARTS shares of the kernels, so that several processes can build at
once. Times are for DeepSeek's sizes in bfloat16, medians of calls captured in a graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
from gpu_micro import randn, time_us
from triton.runtime.errors import OutOfResources

from penstock.ops.attention import AttentionMetadata
from penstock.ops.triton import latent_attention as fused
from penstock.ops.triton.tuning import LatentDecodePlan, Launch, PrefillTile

NOPE, ROPE, VALUE, RANK, BLOCK_SIZE = 128, 64, 128, 512, 64
DECODES = {128: [(1, 8192), (64, 2048)], 16: [(1, 8192), (64, 2048), (256, 1024)]}  # by heads
DECODE_PLANS = {
    128: [
        (rows, tile, Launch(warps, stages))
        for rows, tile, warps, stages in (
            (16, 32, 4, 2), (16, 64, 4, 2), (32, 32, 4, 2), (32, 64, 8, 2), (64, 32, 4, 2),
            (64, 32, 8, 2), (64, 32, 8, 3), (64, 64, 8, 2),
        )
    ],
    16: [
        (16, tile, Launch(warps, stages))
        for tile, warps, stages in (
            (16, 4, 2), (32, 2, 2), (32, 4, 2), (32, 4, 3), (64, 4, 2), (64, 8, 2), (32, 8, 3),
        )
    ],
}  # fmt: skip
PREFILL_TILES = [
    PrefillTile(rows, tile, Launch(warps, stages))
    for rows, tile, warps, stages in (
        (16, 32, 4, 2), (32, 32, 4, 2), (64, 32, 4, 2), (64, 32, 8, 2), (64, 64, 8, 2),
    )
]  # fmt: skip
PROMPT_TILES = [
    PrefillTile(rows, tile, Launch(warps, stages))
    for rows, tile, warps, stages in (
        (64, 32, 4, 2), (64, 64, 4, 3), (128, 32, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3),
        (128, 128, 8, 2),
    )
]  # fmt: skip


class Step:
    """n requests with `query` tokens each, at the end of caches of `length`."""

    def __init__(self, n: int, length: int, query: int, heads: int, prompts: bool = False) -> None:
        blocks = -(-length // BLOCK_SIZE)
        self.cache = randn(n * blocks + 1, BLOCK_SIZE, RANK + ROPE)
        self.nope, self.rope = randn(n * query, heads, NOPE), randn(n * query, heads, ROPE)
        self.entries = randn(n * query, RANK + ROPE)
        self.up = randn(heads, NOPE + VALUE, RANK) * RANK**-0.5
        starts = torch.arange(n + 1, device="cuda", dtype=torch.int32) * query
        lengths = torch.full((n,), length, device="cuda", dtype=torch.int32)
        table = torch.randperm(n * blocks, device="cuda").int().view(n, blocks) + 1
        self.metadata = AttentionMetadata(
            starts, lengths, table, lengths.long(), n if query == 1 else 0, query, length,
            num_prompts=n if prompts else 0, num_prompt_rows=n * query if prompts else 0,
        )  # fmt: skip

    def __call__(self) -> torch.Tensor:
        return fused.latent_attention(
            self.nope, self.rope, self.cache, self.metadata, self.up, 0.07, self.entries
        )


Trial = tuple[str, Callable[[], None], Callable[[], Step]]


def decode() -> Iterator[Trial]:
    own = fused.latent_decode_plan
    for heads, steps in DECODES.items():
        for n, length in steps:
            for rows, tile, launch in DECODE_PLANS[heads]:
                programs = n * -(-heads // rows)
                splits = 1
                while splits < 64 and programs * splits < 192:
                    splits *= 2
                plans = [LatentDecodePlan(rows, tile, splits, 2, launch)]
                if splits == 64:
                    plans.append(LatentDecodePlan(rows, tile, 32, 2, launch))
                for plan in plans:
                    yield (
                        f"decode {heads=} {n=} {length=} {plan}",
                        lambda plan=plan: setattr(fused, "latent_decode_plan", lambda *_: plan),
                        lambda n=n, length=length, heads=heads: Step(n, length, 1, heads),
                    )
            fused.latent_decode_plan = own
            yield (
                f"decode {heads=} {n=} {length=} as tuned",
                lambda: setattr(fused, "latent_decode_plan", own),
                lambda n=n, length=length, heads=heads: Step(n, length, 1, heads),
            )


def prefill() -> Iterator[Trial]:
    for heads in (128, 16):
        for tile in PREFILL_TILES:
            yield (
                f"prefill {heads=} 1024 tokens behind 3072 {tile}",
                lambda tile=tile: setattr(fused, "latent_prefill_tile", lambda *_: tile),
                lambda heads=heads: Step(1, 4096, 1024, heads),
            )


def prompt() -> Iterator[Trial]:
    for tile in PROMPT_TILES:
        yield (
            f"prompt heads=16 2 x 4096 {tile}",
            lambda tile=tile: setattr(fused, "latent_prompt_tile", lambda *_: tile),
            lambda: Step(2, 4096, 4096, 16, prompts=True),
        )


def main(words: list[str]) -> None:
    torch.manual_seed(0)
    makers = {"decode": decode, "prefill": prefill, "prompt": prompt}
    if words[:1] == ["compile"]:
        part, parts = int(words[1]), int(words[2])
        for index, (name, apply, make) in enumerate(
            trial for maker in makers.values() for trial in maker()
        ):
            if index % parts == part:
                apply()
                _try(name, make())
        return
    for word in words or makers:
        for name, apply, make in makers[word]():
            apply()
            step = make()
            if _try(name, step):
                print(f"{time_us(step, 10):9.1f} us  {name}", flush=True)


def _try(name: str, step: Step) -> bool:
    """Whether the configuration fits the GPU."""
    try:
        step()
        torch.cuda.synchronize()
    except OutOfResources as error:
        print(f"   does not fit {name}: {error!s:.100}", flush=True)
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
