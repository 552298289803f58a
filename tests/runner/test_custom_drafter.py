"""A custom drafter is asked for all that any other is."""

from __future__ import annotations

import inspect

from penstock.runner.drafter import Drafter
from penstock.runner.drafters.custom import CustomDrafter


def test_every_method_of_a_drafter_reaches_a_custom_one() -> None:
    methods = [name for name, _ in inspect.getmembers(Drafter, inspect.isfunction)]
    assert {"choose_layers", "load", "propose"} < set(methods)
    assert [name for name in methods if name not in vars(CustomDrafter)] == []
