"""What the supervisor decides: who is suspected, when to wait, what is a hang."""

from __future__ import annotations

import signal
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.black_box import BlackBox, Reading
from penstock.engine.handle import LOOK_INTERVAL_S, Death, HangWatch
from penstock.engine.supervisor import (
    FIRST_DELAY_S,
    LONGEST_DELAY_S,
    QUICK_DEATH_S,
    Quarantine,
    RestartDecision,
    RestartPolicy,
)
from penstock.protocol.step import ScheduledRequest, StepPlan

NO_PROGRESS = RestartDecision(had_progress=False, is_explained=False)


def death(uptime_s: float | None = 0.1) -> Death:
    return Death("signal 9", None, frozenset(), uptime_s)


def plan(*request_ids: str) -> StepPlan:
    scheduled = [ScheduledRequest(request_id, 0, 1, True) for request_id in request_ids]
    return StepPlan(step_id=1, scheduled=scheduled)


# -- restarts


def test_only_quick_deaths_without_a_token_are_waited_for() -> None:
    policy = RestartPolicy(restart_engine=True, max_failures=3)
    assert policy.delay_after(death(QUICK_DEATH_S + 1), NO_PROGRESS) == 0
    assert policy.delay_after(death(), RestartDecision(had_progress=True, is_explained=False)) == 0
    assert policy.delay_after(death(), RestartDecision(had_progress=False, is_explained=True)) == 0
    assert policy.delay_after(death(), NO_PROGRESS) == FIRST_DELAY_S
    assert policy.delay_after(death(uptime_s=None), NO_PROGRESS) == 2 * FIRST_DELAY_S


def test_a_restart_loop_ends_and_progress_begins_it_anew() -> None:
    policy = RestartPolicy(restart_engine=True, max_failures=2)
    for _ in range(3):
        assert policy.delay_after(death(), NO_PROGRESS) is not None
        assert policy.delay_after(death(), NO_PROGRESS) is not None
        assert policy.delay_after(death(), RestartDecision(True, False)) == 0
    assert [policy.delay_after(death(), NO_PROGRESS) is None for _ in range(3)] == [0, 0, 1]


def test_delays_are_bounded() -> None:
    policy = RestartPolicy(restart_engine=True, max_failures=1000)
    delays = [policy.delay_after(death(), NO_PROGRESS) for _ in range(1000)]
    assert max(delay for delay in delays if delay is not None) == LONGEST_DELAY_S


def test_without_restarts_every_death_is_the_last() -> None:
    policy = RestartPolicy(restart_engine=False, max_failures=5)
    assert policy.delay_after(death(1e6), RestartDecision(True, False)) is None


# -- blame


def test_one_that_kills_alone_often_enough_is_convicted() -> None:
    quarantine = Quarantine(max_crashes=2)
    assert quarantine.on_death(["good", "bad"]) == (["good", "bad"], None, False)
    assert quarantine.next_trial() == "good"
    quarantine.clear("good")
    quarantine.end_trial("good")
    assert quarantine.next_trial() == "bad"
    assert quarantine.on_death(["bad"]) == ([], None, True)
    assert quarantine.next_trial() == "bad"
    assert quarantine.on_death(["bad"]) == ([], "bad", True)
    assert not quarantine


def test_a_death_outside_of_its_step_is_not_held_against_the_one_on_trial() -> None:
    quarantine = Quarantine(max_crashes=1)
    quarantine.on_death(["a"])
    for _ in range(5):
        assert quarantine.next_trial() == "a"
        assert quarantine.on_death([]) == ([], None, False)


def test_one_that_leaves_while_on_trial_makes_room_for_the_next() -> None:
    quarantine = Quarantine(max_crashes=1)
    quarantine.on_death(["a", "b"])
    assert quarantine.next_trial() == "a"
    quarantine.forget("a")
    assert quarantine.next_trial() == "b"
    quarantine.forget("b")
    assert not quarantine


@given(
    kills_at=st.dictionaries(st.integers(0, 9), st.integers(0, 3)),
    random_deaths=st.lists(st.integers(1, 40), max_size=2, unique=True),
)
def test_the_guilty_fail_and_the_innocent_end(
    kills_at: dict[int, int], random_deaths: list[int]
) -> None:
    """Ten requests of five tokens; some kill the engine when they come to a certain token.

    Twice the engine dies for another reason, at any moment: nobody fails for that.
    """
    tokens = dict.fromkeys(map(str, range(10)), 0)
    at_last_death = dict(tokens)
    guilty = {str(index): at for index, at in kills_at.items()}
    convicts: set[str] = set()
    quarantine = Quarantine(max_crashes=3)
    for turn in range(1, 1000):
        if not tokens:
            break
        step = [quarantine.on_trial or quarantine.next_trial()] if quarantine else list(tokens)
        killers = [
            request_id for request_id in step if guilty.get(request_id) == tokens[request_id]
        ]
        if killers or turn in random_deaths:
            suspects = [i for i in step if tokens[i] == at_last_death[i]]
            at_last_death.update(tokens)
            _, convict, _ = quarantine.on_death(suspects)
            if convict is not None:
                convicts.add(convict)
                del tokens[convict]
            continue
        for request_id in step:
            tokens[request_id] += 1
            if request_id in quarantine:
                quarantine.clear(request_id)
                quarantine.end_trial(request_id)
            if tokens[request_id] == 5:
                del tokens[request_id]
                quarantine.forget(request_id)
    assert not tokens, "someone waits forever"
    assert convicts == set(guilty)


# -- hangs


def watch_for(watch: HangWatch, readings: list[Reading], is_ready: bool = True) -> str | None:
    for index, reading in enumerate(readings):
        if (wrong := watch.look(reading, is_ready, index * LOOK_INTERVAL_S)) is not None:
            return wrong
    return None


def test_an_engine_without_heartbeat_hangs() -> None:
    still = [Reading(7, 3, False)] * 100
    assert watch_for(HangWatch(10.0, 60.0), still) == "no sign of life for 10 s"
    assert watch_for(HangWatch(30.0, 60.0), still) is None
    assert watch_for(HangWatch(10.0, 60.0), still, is_ready=False) is None  # it loads a model


def test_a_long_step_is_no_hang_until_its_own_limit() -> None:
    in_one_step = [Reading(beat, 3, True) for beat in range(400)]  # 100 s
    assert watch_for(HangWatch(10.0, 101.0), in_one_step) is None
    assert watch_for(HangWatch(10.0, 60.0), in_one_step) == "a step took longer than 60 s"


def test_an_idle_engine_does_not_hang() -> None:
    assert (
        watch_for(HangWatch(10.0, 20.0), [Reading(beat, 3, False) for beat in range(400)]) is None
    )


def test_the_sleep_of_the_whole_machine_is_no_hang() -> None:
    watch = HangWatch(heartbeat_timeout_s=10.0, step_timeout_s=10.0)
    assert watch.look(Reading(1, 1, True), True, now=0.0) is None
    assert watch.look(Reading(1, 1, True), True, now=3600.0) is None
    assert watch.look(Reading(2, 2, True), True, now=3600.3) is None


# -- the black box


def test_the_black_box_knows_the_requests_of_all_steps_in_flight() -> None:
    box = BlackBox.create()
    assert box.read() == Reading(0, 0, False)
    assert box.executing() == frozenset()
    box.work()
    box.begin(plan("a", "b"))
    box.begin(plan("b", "a long one" * 40))
    assert box.executing() == {"a", "b", "a long one" * 40}
    box.end()
    assert box.executing() == {"b", "a long one" * 40}
    box.end()
    box.rest()
    assert box.executing() == frozenset()
    assert box.read() == Reading(0, 1, False)
    box.close()


def test_the_black_box_outlives_a_process_that_is_killed() -> None:
    box = BlackBox.create()
    code = (
        "import os, signal, sys, time\n"
        "from penstock.engine.black_box import BlackBox\n"
        "from penstock.protocol.step import ScheduledRequest, StepPlan\n"
        "box = BlackBox(int(sys.argv[1]))\n"
        "box.start_beating()\n"
        "box.begin(StepPlan(step_id=1, scheduled=[ScheduledRequest('a', 0, 1, True)]))\n"
        "while not box.read().num_beats:\n"
        "    time.sleep(0.001)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(box.fd)], pass_fds=[box.fd])
    assert done.returncode == -signal.SIGKILL
    assert box.executing() == {"a"}
    assert box.read().num_beats >= 1
    box.close()


def test_the_black_box_holds_as_many_ids_as_there_is_room_for() -> None:
    box = BlackBox.create()
    box.begin(plan(*(f"{index}-{'x' * 1000}" for index in range(10_000))))
    assert len(box.executing()) > 1000
    box.end()
    box.begin(plan("a"))
    assert box.executing() == {"a"}
    box.close()
