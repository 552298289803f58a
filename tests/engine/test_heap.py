"""What Python's collector may look at while steps are run."""

from __future__ import annotations

import gc
import weakref

from penstock.engine.heap import settled_heap


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_what_existed_before_is_out_of_sight_and_comes_back() -> None:
    before = gc.get_freeze_count()
    old = Node()
    with settled_heap():
        assert gc.get_freeze_count() > before
        young = Node()
        old_alive, young_alive = weakref.ref(old), weakref.ref(young)
        del old, young
        gc.collect()
        assert young_alive() is None
        assert old_alive() is not None
    gc.collect()
    assert old_alive() is None


def test_an_inner_use_leaves_the_outer_one_in_place() -> None:
    with settled_heap():
        frozen = gc.get_freeze_count()
        with settled_heap():
            pass
        assert gc.get_freeze_count() == frozen
