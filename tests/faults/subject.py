"""A server with a saboteur in its engine, and faults in the midst of a request."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.saboteur import Fault, Gate, saboteur_options, seed_of
from faults.streams import Answer, Body, Streams
from server_process import SMALL, ServerProcess
from waiting import eventually

GREEDY: Body = {"prompt": "Once", "max_tokens": 150, "temperature": 0, "ignore_eos": True}
SEEDED: Body = {**GREEDY, "temperature": 1.0, "seed": 11}
SAMPLED: list[Body] = [
    GREEDY,
    SEEDED,
    {**SEEDED, "n": 3},
    {**SEEDED, "logprobs": 3, "prompt": "and then there were"},
    {**SEEDED, "prompt_logprobs": 2, "prompt": "x" * 90},
]
HELD: Body = {**GREEDY, "seed": seed_of(Fault.WAIT, 40)}


@dataclass
class Subject:
    """A server of the tiny model with a saboteur in its engine."""

    server: ServerProcess
    gate: Gate
    start_gate: Gate

    def run_held(self, bodies: list[Body], fault: Callable[[], object]) -> list[Answer]:
        """Answers of `HELD` and others; `fault` happens in the midst of `HELD`."""

        async def act(streams: Streams) -> None:
            await self.gate.reached()
            await streams.until(lambda: streams.num_tokens >= 20)
            await asyncio.to_thread(fault)
            self.gate.open()

        self.gate.close()
        return Streams(self.server).run([HELD, *bodies], act)

    def kill(self) -> None:
        """The next engine is not ready until `start_gate` is opened."""
        self.start_gate.close()
        os.kill(self.server.engine_pid, signal.SIGKILL)
        eventually(lambda: self.server.get("/health").status_code == 503)


def start_subject(model: Path, folder: Path, *flags: str, **options: Any) -> Subject:
    saboteur, more = saboteur_options(folder / "flag")
    gates = Gate(folder / "flag"), Gate(folder / "flag", at_start=True)
    return Subject(ServerProcess(str(model), *SMALL, *flags, *saboteur, **more, **options), *gates)
