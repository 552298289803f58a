"""A logits processor that breaks the engine it runs in, at the token that a request names.

It is given to a server as ``--logits-processors faults.saboteur:Saboteur`` with this folder's
parent on PYTHONPATH (`saboteur_options`). A request asks for a fault through its seed (`seed_of`).
"""

from __future__ import annotations

import asyncio
import enum
import os
import signal
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.protocol.step import NewRequest
from penstock.runner.logits_processors import LogitsProcessor, ProcessorRows

TESTS = Path(__file__).parents[1]
MAGIC = 0x5AB07A6E << 24


class Fault(enum.IntEnum):
    KILL = 1  # the process, as the kernel does when memory runs out
    ABORT = 2  # as failed checks in C++ do
    HANG = 3
    HANG_ONCE = 4  # in the first process alone, of those that share `flag_path`
    WAIT = 5  # for the `Gate` of the same path to be open


def seed_of(fault: Fault, position: int) -> int:
    """A seed that asks for `fault` when the token after `position` output tokens is sampled."""
    assert 0 <= position < 2**16
    return MAGIC | fault << 16 | position


def saboteur_options(flag_path: Path) -> tuple[list[str], dict[str, Any]]:
    """Flags and keywords for a `ServerProcess` with a saboteur in its engine."""
    env = {"PYTHONPATH": str(TESTS), "SABOTEUR_FLAG": str(flag_path)}
    return ["--logits-processors", "faults.saboteur:Saboteur"], {"env": env}


class Gate:
    """Lets a test act while a request is under way, however fast steps are.

    Requests with `Fault.WAIT` wait at it while it is closed, and all else in their engine with
    them; `at_start` it is engines that do, before they are ready. It is open at first.
    """

    def __init__(self, flag_path: Path, at_start: bool = False) -> None:
        name = f"{flag_path.name}.start" if at_start else flag_path.name
        self._closed = flag_path.with_name(f"{name}.closed")
        self._reached = flag_path.with_name(f"{name}.reached")

    def close(self) -> None:
        self._reached.unlink(missing_ok=True)
        self._closed.touch()

    def open(self) -> None:
        self._closed.unlink()

    async def reached(self) -> None:
        """Wait until a request stands before it."""
        while not self._reached.exists():
            await asyncio.sleep(0.005)

    def pass_through(self) -> None:
        while self._closed.exists():
            self._reached.touch()
            time.sleep(0.005)


class Saboteur(LogitsProcessor):
    def __init__(self) -> None:
        Gate(flag_path(), at_start=True).pass_through()
        self._faults: dict[int, tuple[int, Fault]] = {}  # by slot: where, and which

    def add(self, slot: int, request: NewRequest) -> bool:
        if request.seed >> 24 != MAGIC >> 24:
            return False
        at = request.num_prompt_tokens + (request.seed & 0xFFFF)
        self._faults[slot] = (at, Fault(request.seed >> 16 & 0xFF))
        return True

    def remove(self, slot: int) -> None:
        del self._faults[slot]

    def apply(self, logits: Tensor, rows: ProcessorRows) -> Tensor:
        for slot, position in zip(rows.host_slots.tolist(), rows.positions.tolist(), strict=True):
            at, fault = self._faults[slot]
            if position == at:
                commit(fault)
        return logits


def commit(fault: Fault) -> None:
    if fault is Fault.KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault is Fault.ABORT:
        os.abort()
    elif fault is Fault.HANG:
        time.sleep(3600)
    elif fault is Fault.WAIT:
        Gate(flag_path()).pass_through()
    elif not flag_path().exists():
        flag_path().touch()
        time.sleep(3600)


def flag_path() -> Path:
    return Path(os.environ["SABOTEUR_FLAG"])
