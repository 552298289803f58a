"""ConfinedProcess: the parent's handle of one confined process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.confined.errors import JobError, TooMuchMemory
from penstock.confined.worker import BROKEN, HEAD, OUT_OF_MEMORY, Start
from penstock.protocol.processes import module_command

# One thread and one heap that keeps no large blocks: libraries' thread pools and caches cost memory
# and start-up time here.
_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1024 * 1024),
    "OMP_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
SLOW_NICENESS = 10
EXIT_TIMEOUT_S = 10.0  # from the closing of its socket to its end


class ProcessDied(Exception):
    """The process ended before it answered."""

    def __init__(self, returncode: int) -> None:
        super().__init__(returncode)
        self.returncode = returncode

    @property
    def is_time_up(self) -> bool:
        """Whether it exceeded its CPU time."""
        return self.returncode == -signal.SIGPROF

    @property
    def is_crash(self) -> bool:
        """Whether it ended by itself. A SIGKILL does not count: its sender is unknown."""
        return self.returncode not in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)


class Activity(NamedTuple):
    cpu_s: float  # CPU time so far
    is_runnable: bool  # running, or waiting only for a CPU


class ConfinedProcess:
    """The constructor starts the process. Use it from one thread; `kill` is thread-safe."""

    def __init__(self, start: Start) -> None:
        ours, theirs = socket.socketpair()
        command = module_command("penstock.confined.worker", str(theirs.fileno()))
        with ours, theirs:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=True,  # a terminal's Ctrl-C must not reach it
            )
            self._connection = Connection(ours.detach())
        self._start = start

    @property
    def pid(self) -> int:
        return self._process.pid

    def set_up(self, setup: bytes) -> None:
        """Send the setup and wait until the process is ready. Raises `JobError` if that fails."""
        self._exchange(msgspec.msgpack.encode(self._start), setup)

    def ask(self, job: bytes) -> tuple[bytes, float]:
        """Run a job. Returns its result and CPU seconds. Raises `ProcessDied` and `JobError`."""
        return self._exchange(job)

    def _exchange(self, *messages: bytes) -> tuple[bytes, float]:
        try:
            for message in messages:
                self._connection.send_bytes(message)
            answer = self._connection.recv_bytes()
        except (EOFError, OSError):
            raise ProcessDied(self._end()) from None
        kind, cpu_s = HEAD.unpack_from(answer)
        if kind == OUT_OF_MEMORY:
            raise TooMuchMemory(f"it needs more than {self._start.memory_bytes // 2**20} MiB")
        if kind == BROKEN:
            error = answer[HEAD.size :].decode(errors="replace")
            raise JobError(f"{self._start.entry} failed in its process: {error}")
        return answer[HEAD.size :], cpu_s

    def _end(self) -> int:
        """Return the exit code. A process that only closed its socket is killed and counts as 1."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(EXIT_TIMEOUT_S)
        self.kill()
        self._process.wait()
        return 1

    def activity(self) -> Activity | None:
        """Current activity, or None if the system does not provide it."""
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return None
        fields = text.rpartition(")")[2].split()  # after the name, which may have spaces
        cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return Activity(cpu_s, is_runnable=fields[0] == "R")

    def lower_priority(self) -> None:
        """Let other processes on this machine run first."""
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.pid, SLOW_NICENESS)

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self.kill()
        self._process.wait()
        self._connection.close()
