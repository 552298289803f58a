"""Sampling on a CPU: torch and the C++ library, alternating, on the same rows.

    python benchmarks/cpu_sampling.py --threads 2

Logits are normally distributed with a deviation of 3.5, as is typical of language models. The
script prints medians in milliseconds per step, and checks that the tokens are the same.
"""

from __future__ import annotations

import argparse
import statistics
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from penstock.ops import sampling_cpu
from penstock.ops.cpu import library
from penstock.ops.cpu.sampling import choose_tokens
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.step import NewRequest
from penstock.runner.sampler import Sampler, SamplingRows

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature 1": {"temperature": 1},
    "top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "top_k 40": {"temperature": 0.8, "top_k": 40},
    "top_k 40, top_p 0.9": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    "min_p 0.05": {"temperature": 1, "min_p": 0.05},
}


def make_sampler(op: Any, rows: int, vocab: int, params: dict[str, Any]) -> Sampler:
    tables = SimpleNamespace(
        token_ids=torch.zeros((rows, 8), dtype=torch.int32),
        num_prompt_tokens=torch.ones(rows, dtype=torch.int32),
    )
    sampler = Sampler(tables, vocab, "cpu", op)
    for slot in range(rows):
        sampler.add(
            slot,
            NewRequest(
                request_id=str(slot), token_ids=[1], num_prompt_tokens=1, num_computed_tokens=0,
                params=SamplingParams(**params), seed=slot, eos_token_ids=[],
                bad_words_token_ids=[],
            ),
        )  # fmt: skip
    return sampler


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    native = library.load()
    if native is None:
        parser.error(f"there is nothing to compare: the C++ library is {library.describe()}")
    native.penstock_set_threads(args.threads)
    torch.set_num_threads(1)
    print("| | rows | torch, ms | C++, ms | |\n|---|---|---|---|---|")
    for name, params in CASES.items():
        for rows in args.rows:
            logits = torch.randn((rows, args.vocab)) * 3.5
            samplers = [
                make_sampler(op, rows, args.vocab, params)
                for op in (sampling_cpu.choose_tokens, choose_tokens)
            ]
            slots = np.arange(rows)
            times: tuple[list[float], list[float]] = ([], [])
            for step in range(args.steps):
                positions = torch.full((rows,), step + 1)
                where = SamplingRows(torch.from_numpy(slots), positions, slots, step + 1)
                tokens = []
                for sampler, own in zip(samplers, times, strict=True):
                    started = time.perf_counter()
                    tokens.append(sampler.sample(logits, where).token_ids.tolist())
                    own.append(1e3 * (time.perf_counter() - started))
                assert tokens[0] == tokens[1], "the two must agree"
            before, after = map(statistics.median, times)
            print(f"| {name} | {rows} | {before:.3f} | {after:.3f} | {before / after:.1f}x |")


if __name__ == "__main__":
    main()
