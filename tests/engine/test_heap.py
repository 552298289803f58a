"""What Python's collector may look at while steps are run, and what the system gets back."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
import weakref
from collections.abc import Callable

from penstock.engine.heap import HeapTrimmer, settled_heap
from penstock.protocol.processes import collector_at_rest


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_what_existed_before_is_out_of_sight_and_comes_back() -> None:
    before = gc.get_freeze_count()
    with settled_heap():
        assert gc.get_freeze_count() > before
    check_what_is_collected(within=lambda: None)


def test_an_inner_use_leaves_the_outer_one_in_place() -> None:
    def use_again() -> None:
        with settled_heap():
            pass

    check_what_is_collected(within=use_again)


def check_what_is_collected(within: Callable[[], None]) -> None:
    old = Node()
    with settled_heap():
        young = Node()
        within()
        old_alive, young_alive = weakref.ref(old), weakref.ref(young)
        del old, young
        gc.collect()
        assert young_alive() is None
        assert old_alive() is not None
    gc.collect()
    assert old_alive() is None


def test_a_step_of_thousands_of_requests_sets_off_no_collection() -> None:
    thresholds = gc.get_threshold()
    with settled_heap():
        gc.collect()
        before = [stats["collections"] for stats in gc.get_stats()]
        step = [[number] for number in range(20_000)]
        del step
        assert [stats["collections"] for stats in gc.get_stats()] == before
    assert gc.get_threshold() == thresholds


def test_the_collector_rests_and_is_then_as_it_was() -> None:
    assert gc.isenabled()
    with collector_at_rest():
        assert not gc.isenabled()
        with collector_at_rest():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_program_with_torch_keeps_its_objects_collectable() -> None:
    assert "torch" in sys.modules
    model = Node()
    alive = weakref.ref(model)
    del model
    with collector_at_rest():
        pass
    gc.collect()
    assert alive() is None


def test_what_imports_created_is_walked_neither_afterwards_nor_at_exit() -> None:
    code = """
import gc, sys
from penstock.protocol.processes import collector_at_rest, exit_at_once

CALL

class Node:
    def __init__(self):
        self.itself = self
    def __del__(self):
        print("walked")

with collector_at_rest():
    Node()
gc.collect()
print("exit")
"""
    for call, printed in (
        ("", "exit walked"),
        ("exit_at_once()", "exit"),
        ("exit_at_once(); sys.modules['triton'] = None", "exit walked"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code.replace("CALL", call)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == printed.split()


HOLES = """
import ctypes
from pathlib import Path
from penstock.engine.heap import HeapTrimmer

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
pieces = [libc.malloc(64 << 10) for _ in range(2048)]
for piece in pieces:
    ctypes.memset(piece, 1, 64 << 10)
for piece in pieces[:-1]:  # the last holds the heap's end in its place
    libc.free(ctypes.c_void_p(piece))
HeapTrimmer(interval_s=60).trim_if_due()
before = resident_mib()
HeapTrimmer(interval_s=0).trim_if_due()
print(before - resident_mib())
"""


def test_holes_in_the_heap_are_given_back_when_it_is_time() -> None:
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    if platform.libc_ver()[0] == "glibc":
        assert int(done.stdout) > 100  # of 128 MiB
    HeapTrimmer(interval_s=0).trim_if_due()  # whatever the C library
