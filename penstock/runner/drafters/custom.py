"""CustomDrafter: a drafter from another module, which is trusted as logits processors are."""

from __future__ import annotations

import dataclasses

from penstock.models.base import Hidden
from penstock.protocol.errors import ConfigError
from penstock.protocol.kv import KVCacheSpec
from penstock.protocol.step import NewRequest, StepPlan
from penstock.runner.drafter import Drafter, Drafts, DraftSetup, DraftStep
from penstock.runner.forward import ForwardInputs
from penstock.runner.graphs import GraphPool
from penstock.runner.kv_memory import KVMemory
from penstock.runner.layout import StepLayout
from penstock.runner.plugins import find_class
from penstock.runner.sampler import Sampler
from penstock.runner.tables import RequestTables


class CustomDrafter(Drafter):
    """Runs a drafter that was given as "module:Class", and checks what it proposes.

    Its constructor is called with the maximum number of drafts. What it proposes may depend on
    nothing but its requests, so that all ranks propose the same.
    """

    def __init__(self, spec: str, num_drafts: int, vocab_size: int) -> None:
        self._spec = spec
        self._vocab_size = vocab_size
        self._drafter = _construct(spec, num_drafts)
        self.num_drafts = num_drafts
        self.num_lookahead = self._drafter.num_lookahead
        self.is_on_host = self._drafter.is_on_host
        self.knows_chances = self._drafter.knows_chances

    def choose_layers(self, setup: DraftSetup) -> None:
        self._drafter.choose_layers(setup)

    def load(self, setup: DraftSetup) -> None:
        self._drafter.load(setup)

    def kv_specs(self) -> dict[str, KVCacheSpec]:
        return self._drafter.kv_specs()

    def start(self, tables: RequestTables, memory: KVMemory, sampler: Sampler) -> None:
        self._drafter.start(tables, memory, sampler)

    def use_graphs(self, graphs: GraphPool) -> None:
        self._drafter.use_graphs(graphs)

    def take_blocks(self, plan: StepPlan) -> None:
        self._drafter.take_blocks(plan)

    def add(self, slot: int, request: NewRequest) -> None:
        self._drafter.add(slot, request)

    def remove(self, slot: int) -> None:
        self._drafter.remove(slot)

    def observe(self, inputs: ForwardInputs, hidden: Hidden) -> None:
        self._drafter.observe(inputs, hidden)

    def sees(self, layout: StepLayout) -> bool:
        return self._drafter.sees(layout)

    def propose(self, step: DraftStep) -> Drafts:
        """Raises TypeError for a wrong shape. Tokens outside the vocabulary become others."""
        drafts, shape = self._drafter.propose(step), (len(step.slots), step.num_drafts)
        token_ids, counts = drafts.token_ids, drafts.counts
        if token_ids is None:
            return drafts
        if tuple(token_ids.shape) != shape:
            raise TypeError(
                f"{self._spec}: propose must return token_ids of shape {shape}, "
                f"got {tuple(token_ids.shape)}"
            )
        if counts is not None and counts.shape != shape[:1]:
            raise TypeError(
                f"{self._spec}: propose must return counts of shape {shape[:1]}, got {counts.shape}"
            )
        return dataclasses.replace(
            drafts,
            token_ids=token_ids.to(step.slots.device).clamp(0, self._vocab_size - 1),
            counts=None if counts is None else counts.clip(0, step.num_drafts),
        )


def _construct(spec: str, num_drafts: int) -> Drafter:
    found = find_class(spec, "speculative_config: model")
    if not (isinstance(found, type) and issubclass(found, Drafter)):
        raise ConfigError(
            f"speculative_config: model must be a subclass of {Drafter.__module__}."
            f"{Drafter.__name__}, got {found!r}"
        )
    try:
        return found(num_drafts)  # type: ignore[call-arg]
    except Exception as error:  # a plugin's constructor may raise anything
        raise ConfigError(
            f"speculative_config: {spec}({num_drafts}) cannot be constructed: {error!r}"
        ) from error
