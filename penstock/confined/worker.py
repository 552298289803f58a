"""A confined process: `main` answers jobs on the socket whose file descriptor it is given.

The kernel enforces the limits, so they hold for native code, too. The address space is limited
after the setup. A timer limits the CPU time of each job, over all threads, in milliseconds. Its
signal kills the process. Time in which the process is stopped or waits for a CPU does not count.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import signal
import struct
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

logger = logging.getLogger(__name__)

Handle = Callable[[bytes], bytes]

HEAD = struct.Struct("<Bd")  # of an answer: its kind, CPU seconds
READY, RESULT, OUT_OF_MEMORY, BROKEN = range(4)
LARGE_JOB_BYTES = 64 * 1024  # after a larger job, freed memory is returned to the system


class Start(msgspec.Struct, frozen=True):
    """The first message. The second one is the argument of `entry`."""

    entry: str  # "module:function": takes the setup, returns the function that answers jobs
    cpu_s: float
    memory_bytes: int


def serve(connection: Connection) -> None:
    """Answer jobs until the other side closes the connection."""
    start = msgspec.msgpack.decode(connection.recv_bytes(), type=Start)
    try:
        module, _, name = start.entry.partition(":")
        handle: Handle = getattr(importlib.import_module(module), name)(connection.recv_bytes())
    except Exception as error:
        connection.send_bytes(HEAD.pack(BROKEN, 0.0) + repr(error).encode())
        raise
    limit_memory(start.memory_bytes)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    connection.send_bytes(HEAD.pack(READY, 0.0))
    while True:
        job = connection.recv_bytes()
        is_large = len(job) > LARGE_JOB_BYTES
        # Kills this process even if the parent is gone.
        signal.setitimer(signal.ITIMER_PROF, start.cpu_s)
        started = time.process_time()
        kind, answer = _answer(handle, job)
        del job
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        connection.send_bytes(HEAD.pack(kind, time.process_time() - started) + answer)
        del answer
        if is_large and trim is not None:
            trim(0)


def _answer(handle: Handle, job: bytes) -> tuple[int, bytes]:
    try:
        return RESULT, handle(job)
    except MemoryError:
        return OUT_OF_MEMORY, b""
    except Exception as error:  # a bug: expected errors are part of a job's result
        return BROKEN, repr(error).encode()


def limit_memory(num_bytes: int) -> None:
    """Limit this process to `num_bytes` more memory than now, if the system supports it."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    status = Path("/proc/self/statm")
    if not status.exists():
        logger.warning("The memory of confined processes is not limited on this system")
        return
    limit = int(status.read_text().split()[0]) * resource.getpagesize() + num_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)  # a lower limit of the server's environment
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        serve(connection)
