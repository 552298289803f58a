"""Requests that wait at a gate while their engine is killed, through AsyncLLM."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from faults.saboteur import Fault, Gate, seed_of

from penstock import AsyncLLM, RequestOutput, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
# Waits at the gate when it has 12 tokens, however fast steps are.
HELD = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, seed=seed_of(Fault.WAIT, 12))


async def generate_killed(
    llm: AsyncLLM,
    gate: Gate,
    prompt: Any,
    before: Callable[[], object] = lambda: None,
    **options: Any,
) -> RequestOutput:
    """The last output of a request whose engine dies in the midst of it, just after `before`."""
    gate.close()
    outputs = []
    async for output in llm.generate(prompt, HELD, **options):
        if not outputs:
            before()
            os.kill(llm._client.replicas.members[0].dispatch._engine.process.pid, signal.SIGKILL)
            gate.open()  # for the engine that comes
        outputs.append(output)
    return outputs[-1]
