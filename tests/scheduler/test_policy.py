from __future__ import annotations

from fake_device import make_request
from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler.policy import (
    FairShare,
    FirstComeFirstServed,
    PriorityThenArrival,
    WaitingQueue,
)
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


def test_what_is_removed_and_put_back_is_served_once_at_its_new_rank():
    queue = WaitingQueue(FirstComeFirstServed())
    states = [state_of(sequence) for sequence in range(3)]
    for state in states:
        queue.push(state)
    for rank in (0.5, 1.5, 0.2, 1.5):
        queue.remove(states[0])
        states[0].rank = (rank,)
        queue.put_back(states[0])
    assert drain(queue) == [1, 0, 2]


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


def tenant_state(sequence, tenant, num_tokens=4):
    request = make_request(f"r{sequence}", [2] * num_tokens, max_tokens=4, tenant=tenant)
    return RequestState(request, sequence, max_model_len=1000)


def serve(queue, policy, count):
    """Let requests in, one after the other; whose they were."""
    served = []
    for _ in range(count):
        state = queue.pop()
        policy.insert_running([], state)
        served.append(state.request.tenant)
    return served


def test_fair_a_tenant_with_many_requests_does_not_keep_another_waiting():
    policy = FairShare()
    queue = WaitingQueue(policy)
    for sequence in range(100):
        queue.push(tenant_state(sequence, "greedy"))
    assert serve(queue, policy, 10) == ["greedy"] * 10
    for sequence in range(100, 110):
        queue.push(tenant_state(sequence, "modest"))
    assert serve(queue, policy, 20).count("modest") in (9, 10, 11)


def test_fair_turns_are_counted_in_tokens():
    policy = FairShare()
    queue = WaitingQueue(policy)
    for sequence in range(50):
        queue.push(tenant_state(sequence, "long", num_tokens=36))  # 40 with the output
        queue.push(tenant_state(100 + sequence, "short", num_tokens=4))  # 8
    assert serve(queue, policy, 36).count("short") == 30


def test_fair_nobody_saves_up_turns_by_waiting():
    policy = FairShare()
    queue = WaitingQueue(policy)
    for sequence in range(20):
        queue.push(tenant_state(sequence, "early"))
    serve(queue, policy, 20)
    for sequence in range(20, 40):
        queue.push(tenant_state(sequence, "late"))
        queue.push(tenant_state(100 + sequence, "early"))
    served = serve(queue, policy, 20)
    assert 9 <= served.count("early") <= 11


def test_fair_preempted_requests_go_before_all_others():
    policy = FairShare()
    queue = WaitingQueue(policy)
    queue.push(tenant_state(2, "a"))
    queue.push_preempted(tenant_state(1, "b"))
    queue.push_preempted(tenant_state(0, "b"))
    assert drain(queue) == [0, 1, 2]


@given(tenants=st.lists(st.sampled_from("abc"), max_size=60))
def test_fair_a_tenants_own_requests_keep_their_order(tenants):
    policy = FairShare()
    queue = WaitingQueue(policy)
    for sequence, tenant in enumerate(tenants):
        queue.push(tenant_state(sequence, tenant))
    order = [queue.pop() for _ in tenants]
    for tenant in "abc":
        own = [state.sequence for state in order if state.request.tenant == tenant]
        assert own == sorted(own)
