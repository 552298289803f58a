"""Ranks as threads of one process, each with a shard of the same logits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from penstock.ops.registry import Ops
from penstock.ops.sharded_sampling import VocabShard


class ThreadRanks:
    """Collectives between `size` threads, of which one computes at a time.

    Triton's interpreter is not safe for threads.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._parts: list[torch.Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size)
        self._turn = threading.Lock()

    def stack(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        self._parts[rank] = x
        self._wait()
        stacked = torch.stack(self._parts)
        self._wait()
        return stacked

    def _wait(self) -> None:
        self._turn.release()
        try:
            self._barrier.wait(60)
        finally:
            self._turn.acquire()

    def run(self, compute: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        def take_turns(rank: int) -> torch.Tensor:
            with self._turn:
                return compute(rank)

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(take_turns, range(self.size)))


def choose_over_shards(
    size: int, backend: str, logits: torch.Tensor, *args: torch.Tensor, **options: object
) -> torch.Tensor:
    """Tokens and faults [2, rows] that `size` ranks agree on. `args` as for `choose_tokens`."""
    ranks, ops, vocab_size = ThreadRanks(size), Ops(backend), logits.shape[1]
    width = -(-vocab_size // size)
    padded = torch.nn.functional.pad(logits, (0, width * size - vocab_size), value=1e9)

    def choose(rank: int) -> torch.Tensor:
        first = rank * width
        shard = VocabShard(
            first, min(vocab_size - first, width), width, vocab_size,
            lambda x: ranks.stack(rank, x), ops,
        )  # fmt: skip
        own = padded[:, first : first + width]
        assert torch.equal(shard.whole(own).nan_to_num(), logits.nan_to_num())
        tokens, faulted = shard.choose_tokens(own, *args, **options)  # type: ignore[arg-type]
        return torch.stack((tokens, faulted.long()))

    answers = ranks.run(choose)
    assert all(torch.equal(answer, answers[0]) for answer in answers), "ranks disagree"
    return answers[0]
