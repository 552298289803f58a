"""Which steps a drafter observes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from drafters import Stubborn

from penstock.models.base import Hidden
from penstock.runner.drafters.custom import CustomDrafter
from penstock.runner.forward import ForwardInputs


class Observing(Stubborn):
    def observe(self, inputs: ForwardInputs, hidden: Hidden) -> None:
        raise AssertionError("only whether it is called counts here")


@pytest.mark.parametrize("kind", [Observing, Stubborn])
def test_a_decode_after_which_nothing_is_proposed_is_not_observed(kind: type[Stubborn]) -> None:
    custom = CustomDrafter.__new__(CustomDrafter)
    custom._drafter = kind(2)
    for drafter in (kind(2), custom):
        seen = [drafter.sees(layout) for layout in layouts()]
        assert seen == ([False, True, True, True] if kind is Observing else [False] * 4)


def layouts() -> list[Any]:
    return [
        SimpleNamespace(num_drafts=num_drafts, is_decode=is_decode)
        for is_decode in (True, False)
        for num_drafts in (0, 2)
    ]
