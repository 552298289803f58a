"""Drafters on the host see every token once, wherever the tables are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from penstock.protocol.sampling import SamplingParams
from penstock.protocol.step import NewRequest
from penstock.runner.drafter import DraftStep
from penstock.runner.drafters.host import HostDrafter
from penstock.runner.tables import RequestTables


class Elsewhere(str):
    """The CPU, as a device that is none."""

    type = "elsewhere"


class Recorder(HostDrafter):
    """Drafts its own last token once for each that it has seen."""

    def __init__(self) -> None:
        super().__init__(3)
        self.seen: dict[int, list[int]] = {}

    def enter(self, slot: int, request: NewRequest) -> None:
        self.seen[slot] = list(request.token_ids)

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        self.seen[slot] += token_ids

    def draft(self, slot: int, num_drafts: int) -> list[int]:
        return self.seen[slot][-1:] * min(num_drafts, len(self.seen[slot]) - 2)


@pytest.mark.parametrize("device", [torch.device("cpu"), Elsewhere("cpu")], ids=["cpu", "other"])
def test_each_token_is_seen_once_and_requests_that_want_none_are_left_out(
    device: torch.device,
) -> None:
    tables = RequestTables(4, 16, [], torch.device("cpu"), num_drafts=3)
    tables.device = device
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
    assert drafts.token_ids.tolist() == [[9, 9, 9], [0, 0, 0], [9, 9, 9]]
    drafter.remove(slots[0])
    drafter.remove(slots[1])
    assert list(drafter._num_seen) == [slots[2]]
