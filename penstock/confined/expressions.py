"""Regular expressions of others, tried out: Python's matcher can take any time, and no limit.

What has been matched in a confined process takes no longer here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import TracebackType

import msgspec

from penstock.confined.pool import ConfinedPool, Limits

ENTRY = "penstock.confined.expressions:make_matcher"
LIMITS = Limits(cpu_s=2.0, memory_bytes=2**28, num_workers=1)


class Trial(msgspec.Struct):
    pattern: str
    texts: list[str]


def make_matcher(setup: bytes) -> Callable[[bytes], bytes]:
    """The entry of a confined process: a trial in, what is wrong with its pattern out."""
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
    """A process that tries expressions out. A context manager: it ends with the block."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._pool = ConfinedPool(ENTRY, bytes, limits)

    def __enter__(self) -> ExpressionTrials:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.close()

    def match(self, pattern: str, texts: Sequence[str]) -> float:
        """The CPU seconds that matching all texts takes.

        Raises `ValueError` for what is no expression, and `penstock.confined.errors`.
        """
        job = self._pool.submit(msgspec.msgpack.encode(Trial(pattern, list(texts))))
        if wrong := job.result():
            raise ValueError(wrong.decode())
        return job.cpu_s
