"""PaddedTable: memory for users only, growth on demand, nothing left behind."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runner.sampling_tables import PaddedTable

CPU = torch.device("cpu")


def test_a_table_without_users_has_no_memory() -> None:
    table = PaddedTable(100, 1, torch.int64, -1, CPU)
    assert table._data.numel() == 0
    table.put(5, np.arange(1000))
    assert table._data.shape == (1, 1000)
    table.drop(5)
    assert table._data.numel() == 0


def test_what_is_taken_is_as_wide_as_the_widest_asked_for() -> None:
    table = PaddedTable(10, 2, torch.int64, -1, CPU)
    table.put(0, np.ones((2, 1), dtype=np.int64))
    table.put(1, np.full((1, 3), 7))
    table.put(2, np.zeros((9, 9), dtype=np.int64))
    assert table.take(np.array([1])).tolist() == [[[7, 7, 7]]]
    taken = table.take(np.array([0, 1, 0]))
    assert taken.shape == (3, 2, 3)
    assert taken[0].tolist() == taken[2].tolist() == [[1, -1, -1], [1, -1, -1]]


@settings(max_examples=60)
@given(
    moves=st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 99), max_size=9))),
)
def test_a_table_holds_what_was_put_last(moves: list[tuple[int, list[int]]]) -> None:
    table = PaddedTable(6, 1, torch.int64, -1, CPU)
    held: dict[int, list[int]] = {}
    for slot, values in moves:
        if slot in held:
            table.drop(slot)
            table.drop(slot)  # nothing left to drop
            del held[slot]
        else:
            table.put(slot, np.array(values, dtype=np.int64))
            held[slot] = values
        if held:
            width = max(len(values) for values in held.values())
            expected = [values + [-1] * (width - len(values)) for values in held.values()]
            assert table.take(np.array(list(held))).tolist() == expected
