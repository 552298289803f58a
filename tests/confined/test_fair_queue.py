"""Tenants take turns, and nobody can fill the queue for others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.confined.fair_queue import FairQueue


class Item:
    def __init__(self, tenant: str, number: int) -> None:
        self.tenant, self.number = tenant, number


def test_tenants_take_turns() -> None:
    queue: FairQueue[Item] = FairQueue(10)
    for tenant, number in [("a", 1), ("a", 2), ("a", 3), ("b", 1)]:
        queue.push(tenant, Item(tenant, number))
    assert queue.next_tenant() == "a"
    order = [queue.pop() for _ in range(4)]
    assert [(i.tenant, i.number) for i in order if i] == [("a", 1), ("b", 1), ("a", 2), ("a", 3)]
    assert queue.pop() is None
    assert queue.next_tenant() is None


def test_who_has_most_gives_way_when_it_is_full() -> None:
    queue: FairQueue[Item] = FairQueue(4)
    greedy = [Item("a", i) for i in range(6)]
    assert [queue.push("a", item) for item in greedy] == [None] * 4 + greedy[4:]
    assert queue.push("b", Item("b", 0)) is greedy[3]
    assert queue.push("b", Item("b", 1)) is greedy[2]
    extra = Item("b", 2)
    assert queue.push("b", extra) is extra  # two each: nobody has more
    assert len(queue) == 4


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["push", "pop", "remove"]))))
def test_it_holds_what_was_put_in_and_never_more_than_it_may(steps: list[tuple[str, str]]) -> None:
    queue: FairQueue[Item] = FairQueue(5)
    held: list[Item] = []
    for number, (tenant, what) in enumerate(steps):
        if what == "push":
            item = Item(tenant, number)
            held.append(item)
            if (dropped := queue.push(tenant, item)) is not None:
                held.remove(dropped)
        elif what == "pop":
            popped = queue.pop()
            assert (popped is None) == (not held)
            if popped is not None:
                first = next(item for item in held if item.tenant == popped.tenant)
                assert popped is first
                held.remove(popped)
        else:
            own = [item for item in held if item.tenant == tenant]
            if own:
                assert queue.remove(tenant, own[-1])
                assert not queue.remove(tenant, own[-1])
                held.remove(own[-1])
        assert len(queue) == len(held) <= 5
    assert sorted(queue.clear(), key=id) == sorted(held, key=id)
    assert len(queue) == 0
