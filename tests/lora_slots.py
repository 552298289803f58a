"""An engine whose requests use adapters that were put into slots by hand, and random adapters."""

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
from penstock.layers.experts import expert_parts
from penstock.layers.linear import Linear
from penstock.layers.lora import AdapterWeights, LayerSlots, LinearSlots, PartDelta
from penstock.layers.lora_experts import ExpertSlots
from penstock.layers.lora_labels import LabelSlots
from penstock.layers.lora_vocab import HEAD, EmbedSlots, HeadSlots
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

    def place(self, slot: int, adapter: Path | AdapterWeights) -> None:
        weights = adapter
        if isinstance(weights, Path):
            weights = read_adapter(weights, self._runner.model, MAX_RANK, torch.float32)
        store = self._runner.adapters
        assert store is not None
        with torch.inference_mode():
            for slots in store._slots.values():
                slots.place(slot, slots.prepare(weights))
        store._needs_rows = any(slots.needs_rows for slots in store._slots.values())

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


def slots_of(runner: ModelRunner) -> dict[str, LayerSlots]:
    """All layers that adapters can change."""
    assert runner.adapters is not None
    return dict(runner.adapters._slots)


def random_adapter(
    slots: dict[str, LayerSlots], rank: int = 4, seed: int = 0, scale: float = 0.1
) -> AdapterWeights:
    """Changes every layer. A tied head is changed as the embedding is."""
    generator = torch.Generator().manual_seed(seed)

    def delta(out_features: int, in_features: int) -> PartDelta:
        a = torch.randn(rank, in_features, generator=generator)
        b = torch.randn(out_features, rank, generator=generator) * scale
        return PartDelta(a, b)

    weights = AdapterWeights(rank)
    for name, own in slots.items():
        if isinstance(own, LinearSlots | LabelSlots):
            layer = own.layer
            assert isinstance(layer, Linear)
            for part in layer.parts.values():
                weights.linear[name, part.name] = delta(part.out_features, layer.full_in_features)
        elif isinstance(own, ExpertSlots):
            config = own.config
            shape = (config.intermediate_size, config.hidden_size)
            weights.experts[name] = {
                part: delta(*(shape[::-1] if part.endswith("down_proj") else shape))
                for part in expert_parts(config)
            }
        elif isinstance(own, EmbedSlots):
            weights.embedding[name] = delta(own.layer.hidden_size, own.layer.vocab_size)
        elif isinstance(own, HeadSlots):
            if name == HEAD and own.layer.embed_adapter is not None:
                tied = weights.embedding[own.layer.embed_adapter.name]
                weights.embedding[name] = PartDelta(tied.b.T, tied.a.T)
            else:
                weights.embedding[name] = delta(own.layer.vocab_size, own.layer.hidden_size)
        else:
            raise AssertionError(f"what is {name}?")
    return weights
