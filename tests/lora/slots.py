"""An engine whose requests use adapters that were put into slots by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from tiny_engine import open_llm

from penstock import LLM
from penstock.executor.in_process import InProcessExecutor
from penstock.layers.lora import AdapterWeights
from penstock.loading.adapters.read import read_adapter
from penstock.protocol.step import NO_SLOT, StepPlan
from penstock.runner.runner import ModelRunner

MAX_RANK = 64


def runner_of(llm: LLM) -> ModelRunner:
    executor = llm.engine.executor
    assert isinstance(executor, InProcessExecutor)
    runner = executor.worker.runner
    assert runner is not None
    return runner


class Slots:
    """Puts adapters into slots, and says which slot the requests to come use."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._launch = runner.launch
        self._entered = 0
        self.order: Sequence[int] = [NO_SLOT]  # of new requests, in turn
        runner.launch = self._launch_with_slots  # type: ignore[method-assign]

    def place(self, slot: int, adapter: Path | AdapterWeights) -> AdapterWeights:
        weights = adapter
        if isinstance(weights, Path):
            weights = read_adapter(weights, self._runner.model, MAX_RANK, torch.float32)
        store = self._runner.adapters
        assert store is not None
        with torch.inference_mode():
            for slots in store._slots.values():
                slots.place(slot, slots.prepare(weights))
        return weights

    def use(self, *order: int) -> None:
        """New requests use these slots in turn."""
        self.order, self._entered = order, 0

    def _launch_with_slots(self, plan: StepPlan) -> Any:
        new = []
        for request in plan.new_requests:
            slot = self.order[self._entered % len(self.order)]
            self._entered += 1
            new.append(msgspec.structs.replace(request, adapter_slot=slot))
        return self._launch(msgspec.structs.replace(plan, new_requests=new))


@contextmanager
def open_with_slots(checkpoint: Path, **options: Any) -> Iterator[tuple[LLM, Slots]]:
    own = {"enable_lora": True, "max_lora_rank": MAX_RANK, "enable_prefix_caching": False}
    with open_llm(checkpoint, **own | options) as llm:
        yield llm, Slots(runner_of(llm))
