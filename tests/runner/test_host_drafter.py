"""Drafters on the host see every token once, wherever the tables are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from penstock.protocol.sampling import SamplingParams
from penstock.protocol.step import NewRequest
from penstock.runner.drafter import DraftStep
from penstock.runner.drafters.chances import ALONE, OWN, DraftChances, kind_of
from penstock.runner.drafters.host import (
    LONGEST_REST_IF_FEW_PAY,
    PATIENCE_IF_FEW_PAY,
    Draft,
    HostDrafter,
)
from penstock.runner.tables import RequestTables

KIND = kind_of(OWN, ALONE, 4)


class Recorder(HostDrafter):
    """Drafts its own last token once for each that it has seen."""

    def __init__(self) -> None:
        super().__init__(3)
        self.seen: dict[int, list[int]] = {}

    def enter(self, slot: int, request: NewRequest) -> None:
        self.seen[slot] = list(request.token_ids)

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        self.seen[slot] += token_ids

    def search(self, slot: int, num_drafts: int) -> Iterable[Iterator[Draft]]:
        tokens = self.seen[slot][-1:] * min(num_drafts, len(self.seen[slot]) - 2)
        return [iter([(token, KIND) for token in tokens])]


def test_each_token_is_seen_once_and_requests_that_want_none_are_left_out() -> None:
    tables = RequestTables(4, 16, [], torch.device("cpu"), num_drafts=3)
    drafter = Recorder()
    slots = []
    for name, prompt in (("a", [1, 2]), ("b", [3]), ("c", [4, 5, 6])):
        request = NewRequest(
            request_id=name,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            num_computed_tokens=0,
            params=SamplingParams(speculative=name != "b"),
            seed=0,
        )
        slots.append(tables.add(request))
        drafter.add(slots[-1], request)
    for token, chosen in ((7, slots), (8, slots[1:]), (9, slots)):
        own = torch.tensor(chosen)
        tables.append_tokens(torch.tensor(slots), torch.full((3,), token))
        step = DraftStep(tables, own, np.array(chosen), own, torch.zeros_like(own), 3)
        drafts = drafter.propose(step)
    assert drafter.seen == {slots[0]: [1, 2, 7, 8, 9], slots[2]: [4, 5, 6, 7, 8, 9]}
    assert drafts.counts is not None
    assert drafts.counts.tolist() == [3, 0, 3]
    assert tables.read_drafts(torch.tensor(slots), 3).tolist() == [[9, 9, 9], [0, 0, 0], [9, 9, 9]]
    drafter.remove(slots[0])
    drafter.remove(slots[1])
    assert list(drafter._followed) == [slots[2]]


class Script(HostDrafter):
    """Drafts the tokens that it is given, always of the same kind. Counts its searches."""

    def __init__(self, drafts: list[int]) -> None:
        super().__init__(len(drafts))
        self.drafts = drafts
        self.num_searches = 0

    def enter(self, slot: int, request: NewRequest) -> None:
        pass

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        pass

    def search(self, slot: int, num_drafts: int) -> Iterable[Iterator[Draft]]:
        self.num_searches += 1
        return [iter([(token, KIND) for token in self.drafts])]


class Run:
    """One request, whose drafts are verified and followed by the tokens that the test gives."""

    def __init__(self, drafter: HostDrafter) -> None:
        self.drafter = drafter
        self.tables = RequestTables(1, 4096, [], torch.device("cpu"), num_drafts=8)
        request = NewRequest(
            request_id="a",
            token_ids=[1],
            num_prompt_tokens=1,
            num_computed_tokens=0,
            params=SamplingParams(),
            seed=0,
        )
        self.slots = torch.tensor([self.tables.add(request)])
        drafter.add(0, request)

    def step(self, token_ids: list[int], least_chance: float) -> int:
        """Returns how many drafts are proposed."""
        for token in token_ids:
            self.tables.append_tokens(self.slots, torch.tensor([token]))
        num_drafts, none = self.drafter.num_drafts, torch.zeros_like(self.slots)
        drafts = self.drafter.propose(
            DraftStep(
                self.tables, self.slots, self.slots.numpy(), none, none, num_drafts, least_chance
            )
        )
        assert drafts.counts is not None
        return int(drafts.counts[0])


def test_drafts_that_hold_less_often_than_pays_are_left_out() -> None:
    run = Run(Script([5, 6, 7, 8]))
    assert run.step([2], least_chance=0.0) == 4
    for _ in range(60):
        run.step([5, 6, 7, 8, 9], least_chance=0.5)  # all of them hold
    assert run.step([2], least_chance=0.5) == 4
    for _ in range(60):
        run.step([3], least_chance=0.5)  # none does
    assert run.step([3], least_chance=0.5) == 0


def test_drafts_that_are_not_proposed_are_compared_with_what_comes() -> None:
    run = Run(Script([5]))
    for _ in range(30):
        assert run.step([3], least_chance=0.98) == 0
    for _ in range(1200):
        assert run.step([5], least_chance=0.98) == 0  # right, and does not pay
    most = max(run.step([5], least_chance=0.9) for _ in range(LONGEST_REST_IF_FEW_PAY + 1))
    assert most == 1


def test_nothing_is_searched_while_no_draft_can_pay() -> None:
    drafter = Script([5])
    run = Run(drafter)
    for _ in range(30):
        assert run.step([5], least_chance=1.0) == 0
    assert drafter.num_searches == 0
    run.step([5], least_chance=0.0)
    assert drafter.num_searches == 1


def test_a_request_is_searched_less_often_while_searches_are_in_vain() -> None:
    drafter = Script([5])
    run = Run(drafter)
    num_steps = 160
    for _ in range(num_steps):
        run.step([3], least_chance=0.98)
    assert drafter.num_searches < num_steps / 5
    while not run.step([5], least_chance=0.0):
        pass
    before = drafter.num_searches
    for _ in range(PATIENCE_IF_FEW_PAY):
        run.step([3], least_chance=0.98)
    assert drafter.num_searches == before + PATIENCE_IF_FEW_PAY


def test_the_chance_of_a_kind_is_the_share_of_its_recent_drafts_that_held() -> None:
    chances = DraftChances()
    other = kind_of(OWN, ALONE, 12)
    before = chances.by_kind[other]
    for index in range(600):
        chances.record(KIND, index % 4 != 0)
    assert abs(chances.by_kind[KIND] - 0.75) < 0.05
    assert chances.by_kind[other] == before
    for _ in range(300):
        chances.record(KIND, False)
    assert chances.by_kind[KIND] < 0.1
