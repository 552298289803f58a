"""Which connections take too long, by a clock of the test's own."""

from __future__ import annotations

import pytest

from penstock.server.http.connections import MIN_BYTES_READ, ConnectionWatch

LIMIT_S = 8.0


class Cycle:
    response_complete = False
    response_started = True
    more_body = False


class Connection:
    """As the watch sees one whose answer is being written; its own transport and flow control."""

    def __init__(self) -> None:
        self.transport = self.flow = self
        self.cycle = Cycle()
        self.timeout_keep_alive_task = None
        self.num_resumes = 0
        self.num_unsent = 0
        self.is_aborted = False

    @property
    def write_paused(self) -> bool:
        return self.num_unsent > MIN_BYTES_READ

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        self.is_aborted = True


def watch_for(connection: Connection, seconds: int, num_unsent: int, num_resumes_each: int) -> None:
    watch = ConnectionWatch(read_timeout_s=LIMIT_S, write_timeout_s=LIMIT_S)
    for now in range(seconds):
        connection.num_unsent = num_unsent
        connection.num_resumes += num_resumes_each
        watch.look([connection], float(now))


def test_one_that_takes_nothing_is_cut_off() -> None:
    connection = Connection()
    watch_for(connection, int(LIMIT_S), MIN_BYTES_READ + 1, num_resumes_each=0)
    assert not connection.is_aborted
    watch_for(connection, int(LIMIT_S) + 3, MIN_BYTES_READ + 1, num_resumes_each=0)
    assert connection.is_aborted


@pytest.mark.parametrize("num_unsent", [MIN_BYTES_READ + 1, 64 * MIN_BYTES_READ])
def test_one_that_takes_all_between_two_looks_is_not_cut_off(num_unsent: int) -> None:
    """Each time, as much waits as the time before: a long answer to a slow reader."""
    connection = Connection()
    watch_for(connection, int(10 * LIMIT_S), num_unsent, num_resumes_each=1)
    assert not connection.is_aborted


def test_time_in_which_the_server_stood_still_is_no_clients_fault() -> None:
    """As when its machine is suspended: what the client did meanwhile has not been seen."""
    connection = Connection()
    connection.num_unsent = MIN_BYTES_READ + 1
    watch = ConnectionWatch(read_timeout_s=LIMIT_S, write_timeout_s=LIMIT_S)
    for now in (0.0, 1.0, 1000.0):
        watch.look([connection], now)
    assert not connection.is_aborted
    for seconds in range(int(LIMIT_S)):
        watch.look([connection], 1001.0 + seconds)
    assert connection.is_aborted
