"""Tries untrusted regular expressions in a confined process.

Python's matcher can take unlimited time and has no timeout. An expression that passed the trial
takes no longer on the same texts in this process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec

from penstock.confined.pool import ConfinedPool, Limits

ENTRY = "penstock.confined.expressions:make_matcher"
LIMITS = Limits(cpu_s=2.0, memory_bytes=2**28, num_workers=1)


class Trial(msgspec.Struct):
    pattern: str
    texts: list[str]


def make_matcher(setup: bytes) -> Callable[[bytes], bytes]:
    """The entry point of a confined process. Returns a function from a trial to an error text."""
    read = msgspec.msgpack.Decoder(Trial).decode

    def match(job: bytes) -> bytes:
        trial = read(job)
        try:
            for text in trial.texts or [""]:
                re.match(trial.pattern, text)
        except (re.error, RecursionError, OverflowError) as error:
            return (str(error) or type(error).__name__).encode()
        return b""

    return match


class ExpressionTrials:
    """A process that tries expressions. Close it."""

    def __init__(self) -> None:
        self._pool = ConfinedPool(ENTRY, bytes, LIMITS)

    def close(self) -> None:
        self._pool.close()

    def match(self, pattern: str, texts: Sequence[str]) -> float:
        """Return the CPU seconds that matching all texts takes.

        Raises `ValueError` for an invalid expression, and the errors of `penstock.confined.errors`.
        """
        job = self._pool.submit(msgspec.msgpack.encode(Trial(pattern, list(texts))))
        if wrong := job.result():
            raise ValueError(wrong.decode())
        return job.cpu_s
