"""The library's own threads."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from penstock.ops.cpu.library import load
from penstock.ops.cpu.packed import PackedLinear, PackedMatrix

# Each thread reserves megabytes for its stack, so that the limit ends them long before the 64th.
TOO_MANY = """
import resource
from penstock.models.backend import start_threads
from penstock.ops.cpu.library import load
from penstock.protocol.errors import ConfigError
library = load()
start_threads(library, 2)
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**26,) * 2)
try:
    start_threads(library, 64)
except ConfigError as error:
    print(library.penstock_threads(), error)
"""


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


def test_threads_that_the_system_does_not_give_are_an_error_not_the_process_end() -> None:
    result = subprocess.run([sys.executable, "-c", TOO_MANY], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("1 cpu_threads=64: the system gives this process no more than ")


def test_there_is_always_one_thread(generator: torch.Generator) -> None:
    library = load()
    assert library is not None
    before = library.penstock_threads()
    linear = PackedLinear([PackedMatrix(torch.randn(9, 32, generator=generator))])
    x = torch.randn(20, 32, generator=generator)
    expected = linear(x, None)
    assert library.penstock_set_threads(0) == library.penstock_threads() == 1
    assert torch.equal(linear(x, None), expected)
    library.penstock_set_threads(before)
