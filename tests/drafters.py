"""Drafters for tests: right most of the time, and wrong now and then or always."""

from __future__ import annotations

import random
from typing import Any

import torch

from penstock.runner.drafter import Drafter, Drafts, DraftStep


class Oracle(Drafter):
    """Drafts what followed the last two tokens in an undisturbed run. Every few positions the
    second draft is `wrong` instead; `num_accepted` counts those that held."""

    def __init__(
        self, outputs: list[list[int]], wrong: int, num_drafts: int = 3, wrong_every: int = 4
    ) -> None:
        self.num_drafts = num_drafts
        self.num_accepted = 0
        self._wrong, self._wrong_every = wrong, wrong_every
        self._following: dict[tuple[int, ...], list[int]] = {}
        for tokens in outputs:
            for end in range(2, len(tokens)):
                self._following[tuple(tokens[end - 2 : end])] = tokens[end : end + num_drafts]

    def propose(self, step: DraftStep) -> Drafts:
        self.num_accepted += int(step.num_accepted.sum())
        tables, slots = step.tables, step.slots
        drafts = []
        for slot, count in zip(slots.tolist(), tables.num_tokens[slots].tolist(), strict=True):
            pair = tuple(tables.token_ids[slot, count - 2 : count].tolist())
            draft = [*self._following.get(pair, []), *[9] * self.num_drafts][: self.num_drafts]
            if count % self._wrong_every == 0:
                draft[1 % self.num_drafts] = self._wrong
            drafts.append(draft)
        return Drafts(torch.tensor(drafts)[:, : step.num_drafts])


class Stubborn(Drafter):
    """Drafts the same token every time, which hardly ever holds."""

    def __init__(self, num_drafts: int = 5, token_id: int = 9) -> None:
        self.num_drafts = num_drafts
        self._token_id = token_id

    def propose(self, step: DraftStep) -> Drafts:
        return Drafts(torch.full((len(step.slots), step.num_drafts), self._token_id))


class AtRandom(Drafter):
    """Proposes anything, also tokens that do not exist. It is the same on all ranks."""

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts
        self._rng = random.Random(0)

    def propose(self, step: DraftStep) -> Drafts:
        draw, shape = self._rng.randrange, (len(step.slots), step.num_drafts)
        drafts = [[draw(-9, 600) for _ in range(shape[1])] for _ in range(shape[0])]
        return Drafts(torch.tensor(drafts))


class Recording(Drafter):
    """Mixed into a drafter: remembers what it proposed after which tokens."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.proposals: list[tuple[list[int], list[int]]] = []

    def propose(self, step: DraftStep) -> Drafts:
        drafts = super().propose(step)
        counts = [step.num_drafts] * len(step.slots)
        if drafts.counts is not None:
            counts = drafts.counts.tolist()
        for slot, count, own in zip(step.slots, counts, drafts.token_ids.tolist(), strict=True):
            known = step.tables.token_ids[slot, : int(step.tables.num_tokens[slot])]
            self.proposals.append((known.tolist(), own[:count]))
        return drafts
