"""Workloads of the benchmarks: reference workloads by name, or random prompts of given lengths.

Prompts are token ids and end-of-text is ignored. So lengths are exact and the same for every
engine that is compared. The reference workloads are fixed: their seeds, their order and the order
of the draws within each must never change.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from penstock.protocol.sampling import SamplingParams

VOCAB = 10_000  # the largest token id drawn; small enough for every model

Length = int | tuple[int, int]  # exact, or drawn from low to high, both included


@dataclass(frozen=True)
class Shape:
    """The number of requests, their lengths and the temperature."""

    num_requests: int
    input_len: Length
    output_len: Length
    temperature: float = 0.0


@dataclass(frozen=True)
class Workload:
    """Requests to run. `prompts[i]` generates exactly `output_lens[i]` tokens."""

    name: str
    prompts: list[list[int]]
    output_lens: list[int]
    temperature: float

    @property
    def num_input_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def sampling_params(self, *, detokenize: bool) -> list[SamplingParams]:
        return [
            SamplingParams(
                temperature=self.temperature,
                max_tokens=length,
                ignore_eos=True,
                detokenize=detokenize,
            )
            for length in self.output_lens
        ]


# By seed: the workloads drawn from one generator, in this order.
_DRAWINGS: dict[int, dict[str, Shape]] = {
    0: {"nano": Shape(256, (100, 1024), (100, 1024), temperature=0.6)},
    1: {
        "thr": Shape(512, 512, 256),
        "dec1": Shape(1, 128, 256),
        "dec64": Shape(64, 128, 256),
        "pre": Shape(32, 4096, 1),
    },
    2: {
        "cpu_a": Shape(1, 128, 128),
        "cpu_b": Shape(16, 128, 128),
        "cpu_c": Shape(32, (16, 512), 64),
        "cpu_p": Shape(1, 512, 1),
    },
}
NAMES = tuple(name for shapes in _DRAWINGS.values() for name in shapes)


def named_workload(name: str) -> Workload:
    """The reference workload `name`, one of `NAMES`."""
    for seed, shapes in _DRAWINGS.items():
        if name in shapes:
            rng = random.Random(seed)
            for drawn, shape in shapes.items():  # earlier workloads advance the generator
                workload = _draw(drawn, shape, rng)
                if drawn == name:
                    return workload
    raise KeyError(name)


def random_workload(shape: Shape, seed: int = 0) -> Workload:
    """Draw random prompts of this shape. The same seed gives the same prompts."""
    return _draw("random", shape, random.Random(seed))


def _draw(name: str, shape: Shape, rng: random.Random) -> Workload:
    def length(of: Length) -> int:
        return of if isinstance(of, int) else rng.randint(*of)

    def prompt() -> list[int]:
        return [rng.randint(0, VOCAB) for _ in range(length(shape.input_len))]

    prompts = [prompt() for _ in range(shape.num_requests)]
    output_lens = [length(shape.output_len) for _ in range(shape.num_requests)]
    return Workload(name, prompts, output_lens, shape.temperature)
