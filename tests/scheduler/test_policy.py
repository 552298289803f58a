from __future__ import annotations

from fake_device import make_request
from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler.policy import FirstComeFirstServed, PriorityThenArrival, WaitingQueue
from penstock.scheduler.request import RequestState


def state_of(sequence, priority=0, arrival_time=0.0):
    request = make_request(f"r{sequence}", [2], priority=priority, arrival_time=arrival_time)
    return RequestState(request, sequence, max_model_len=10)


def drain(queue):
    return [queue.pop().sequence for _ in range(len(queue))]


def test_fcfs_serves_in_order_and_preempted_requests_before_all_others():
    queue = WaitingQueue(FirstComeFirstServed())
    states = [state_of(sequence) for sequence in range(5)]
    for state in states[2:]:
        queue.push(state)
    queue.push_preempted(states[1])  # the last of the running goes first,
    queue.push_preempted(states[0])  # so the one before it ends up in front of it
    assert drain(queue) == [0, 1, 2, 3, 4]


def test_priority_keeps_its_order_over_a_preemption():
    queue = WaitingQueue(PriorityThenArrival())
    queue.push(state_of(0, priority=2))
    queue.push(state_of(1, priority=1, arrival_time=9.0))
    queue.push_preempted(state_of(2, priority=3))
    queue.push(state_of(3, priority=1, arrival_time=8.0))
    assert drain(queue) == [3, 1, 0, 2]


def test_what_is_put_back_keeps_its_place():
    queue = WaitingQueue(FirstComeFirstServed())
    for sequence in range(3):
        queue.push(state_of(sequence))
    aside = [queue.pop(), queue.pop()]
    for state in aside:
        queue.put_back(state)
    assert drain(queue) == [0, 1, 2]


@given(priorities=st.lists(st.integers(0, 3), max_size=200), removed=st.sets(st.integers(0, 199)))
def test_removal_leaves_the_rest_in_order_and_the_heap_small(priorities, removed):
    queue = WaitingQueue(PriorityThenArrival())
    states = [state_of(sequence, priority) for sequence, priority in enumerate(priorities)]
    for state in states:
        queue.push(state)
    kept = []
    for state in states:
        if state.sequence in removed:
            queue.remove(state)
            queue.remove(state)
        else:
            kept.append((state.request.priority, state.sequence))
    assert len(queue._heap) <= 2 * len(queue) + 64
    assert drain(queue) == [sequence for _, sequence in sorted(kept)]
