"""The library's own threads."""

from __future__ import annotations

import threading

import pytest
import torch

from penstock.ops.cpu.library import load
from penstock.ops.cpu.packed import PackedLinear, PackedMatrix


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_do_not_depend_on_the_number_of_threads(
    isa: str, generator: torch.Generator, threads: int
) -> None:
    library = load()
    assert library is not None
    linear = PackedLinear([PackedMatrix(torch.randn(300, 200, generator=generator))])
    x = torch.randn(50, 200, generator=generator)
    expected = linear(x, None)
    library.penstock_set_threads(threads)
    assert library.penstock_threads() == threads
    for _ in range(200):
        assert torch.equal(linear(x, None), expected)


def test_callers_in_several_threads_wait_for_each_other(
    isa: str, generator: torch.Generator
) -> None:
    linear = PackedLinear([PackedMatrix(torch.randn(300, 200, generator=generator))])
    inputs = [torch.randn(20, 200, generator=generator) for _ in range(4)]
    expected = [linear(x, None) for x in inputs]
    wrong: list[int] = []

    def call(index: int) -> None:
        for _ in range(100):
            if not torch.equal(linear(inputs[index], None), expected[index]):
                wrong.append(index)

    callers = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong
