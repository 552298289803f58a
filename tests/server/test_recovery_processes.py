"""Spares, ranks and whole servers die, disks and files run out: nothing is lost or left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path

import pytest
from faults.streams import Streams
from faults.subject import GREEDY, HELD, SEEDED
from server_process import SMALL, ServerProcess, is_running
from test_recovery import Serve, assert_whole, counters, model, serve
from waiting import eventually

__all__ = ["model", "serve"]


def test_a_log_on_a_full_disk_stops_nobody(model: Path) -> None:
    flags = (*SMALL, "--access-log", "--log-level", "debug")
    server = ServerProcess(str(model), *flags, log_to=Path("/dev/full"))
    try:
        calm = Streams(server).run([GREEDY, SEEDED])
        streams = Streams(server)
        for answers, undisturbed in zip(
            streams.run_during([GREEDY, SEEDED], streams.kills(1, (10, 20), seed=1)),
            calm,
            strict=True,
        ):
            assert all(answer == undisturbed for answer in answers)
        assert server.stop() == 0
    finally:
        server.close()


@pytest.mark.slow
def test_standard_output_on_a_full_disk_stops_nobody(model: Path) -> None:
    server = ServerProcess(str(model), *SMALL, banner_to=Path("/dev/full"))
    try:
        assert_whole(Streams(server).run([GREEDY]))
        assert server.stop() == 0
    finally:
        server.close()
    assert "standard output cannot be written to" in "".join(server.log)
    assert "Traceback" not in "".join(server.log)


def test_connections_that_take_all_files_do_not_keep_the_engine_from_coming_back(
    model: Path,
) -> None:
    server = ServerProcess(str(model), *SMALL, "--access-log", max_open_files=200)
    try:
        with contextlib.ExitStack() as stack:
            first = server.engine_pid
            for _ in range(200):
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            os.kill(first, signal.SIGKILL)
            eventually(lambda: server.has_logged("The engine has restarted"))
        assert not server.has_logged("cannot be started")
        assert server.has_logged("136 connections at once")
        eventually(lambda: server.post("/v1/completions", GREEDY).status_code == 200)
    finally:
        server.close()


def spare_pid(server: ServerProcess) -> int:
    """The spare, once there are an engine and a spare."""

    def spare_pids() -> set[int]:
        return {pid for pid in server.child_pids() - server.engine_pids() if is_running(pid)}

    eventually(lambda: len(server.engine_pids()) == len(spare_pids()) == 1)
    (pid,) = spare_pids()
    return pid


def kill_until_there_is_a_spare(server: ServerProcess) -> int:
    first = server.engine_pid
    os.kill(first, signal.SIGKILL)  # after a death there is one soon
    eventually(lambda: server.engine_pids() not in ({first}, set()))
    return spare_pid(server)


def test_a_spare_takes_the_place_of_a_dead_engine(serve: Serve) -> None:
    server = serve("--spare-engine").server
    calm = Streams(server).run([GREEDY])
    spare = kill_until_there_is_a_spare(server)
    assert spare != server.engine_pid
    os.kill(server.engine_pid, signal.SIGKILL)
    eventually(lambda: server.engine_pids() == {spare})
    assert Streams(server).run([GREEDY]) == calm

    left = {spare_pid(server), spare}
    server.process.kill()
    server.process.wait()
    eventually(lambda: not any(map(is_running, left)))


@pytest.mark.slow
def test_an_engine_goes_on_without_its_spare(serve: Serve) -> None:
    server = serve("--spare-engine").server
    calm = Streams(server).run([GREEDY])
    dead_spare = kill_until_there_is_a_spare(server)
    engine = server.engine_pid
    os.kill(dead_spare, signal.SIGKILL)
    eventually(lambda: not is_running(dead_spare))
    assert server.engine_pid == engine
    os.kill(engine, signal.SIGKILL)  # whoever comes then, comes from nothing
    assert Streams(server).run([GREEDY]) == calm
    assert server.engine_pid not in (engine, dead_spare)


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGSTOP],
    ids=["restarting", "stopped"],
)
def test_a_killed_server_leaves_no_engine_behind(serve: Serve, number: int) -> None:
    server = serve().server
    first = server.engine_pid
    os.kill(first, number)
    eventually(lambda: number == signal.SIGSTOP or server.engine_pids() not in ({first}, set()))
    engine = server.engine_pid
    server.process.kill()
    server.process.wait()
    eventually(lambda: not is_running(engine))


def test_the_death_of_a_rank_is_the_death_of_the_engine(serve: Serve) -> None:
    subject = serve("--tensor-parallel-size", "2")
    server = subject.server
    calm = Streams(server).run([HELD, SEEDED])

    def kill_rank() -> None:
        os.kill(children(server.engine_pid)[1], signal.SIGKILL)

    assert subject.run_held([SEEDED], kill_rank) == calm
    assert counters(server)["engine_restarts"] == 1
    ranks = children(server.engine_pid)
    assert server.stop() == 0
    eventually(lambda: not any(map(is_running, ranks)))


@pytest.mark.slow
def test_a_rank_that_dies_with_nothing_to_do_ends_the_engine(serve: Serve) -> None:
    subject = serve("--tensor-parallel-size", "2")
    server = subject.server
    subject.start_gate.close()
    os.kill(children(server.engine_pid)[0], signal.SIGKILL)
    eventually(lambda: server.get("/health").status_code == 503)
    ranks = children(server.engine_pid)  # of the engine that comes
    assert server.stop() == 0
    eventually(lambda: not any(map(is_running, ranks)))


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    eventually(lambda: len(path.read_text().split()) == 2)
    return [int(child) for child in path.read_text().split()]
