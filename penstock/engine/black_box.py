"""BlackBox: what an engine is doing, in a file in memory that outlives the engine.

The engine writes and whoever supervises it reads; neither waits for the other, and what was
written stays there however the engine ends. A write is one system call of a microsecond or two.
"""

from __future__ import annotations

import os
import struct
import tempfile
import threading
from collections import deque
from typing import NamedTuple

import msgspec

from penstock.protocol.step import StepPlan

BEAT_INTERVAL_S = 0.25

_BEATS = struct.Struct("<Q")
_TURNS = struct.Struct("<QQ")  # turns, whether one goes on
_LENGTH = struct.Struct("<Q")  # of the ids that follow
_TURNS_AT = _BEATS.size
_STEP_AT = _TURNS_AT + _TURNS.size


class Reading(NamedTuple):
    """Signs of life. Numbers that no longer change are what a hang looks like."""

    num_beats: int  # of a thread that does nothing else
    num_turns: int  # of the engine's loop
    is_working: bool  # in a turn; else it waits for requests


class BlackBox:
    """Shared by an engine and its supervisor through an inherited file descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._num_beats = 0
        self._num_turns = 0
        self._steps: deque[list[str]] = deque()  # in flight

    @classmethod
    def create(cls) -> BlackBox:
        """An empty one, in memory where the system has files in memory."""
        if hasattr(os, "memfd_create"):
            return cls(os.memfd_create("penstock-black-box"))
        with tempfile.TemporaryFile(prefix="penstock-") as file:
            return cls(os.dup(file.fileno()))

    def close(self) -> None:
        os.close(self.fd)

    # -- the engine's side

    def start_beating(self) -> None:
        """Show from now on, from a thread of its own, that this process runs."""

        def beat() -> None:
            while True:
                self._num_beats += 1
                os.pwrite(self.fd, _BEATS.pack(self._num_beats), 0)
                pause.wait(BEAT_INTERVAL_S)

        pause = threading.Event()
        threading.Thread(target=beat, name="heartbeat", daemon=True).start()

    def work(self) -> None:
        """A turn of the engine's loop begins."""
        self._num_turns += 1
        os.pwrite(self.fd, _TURNS.pack(self._num_turns, 1), _TURNS_AT)

    def rest(self) -> None:
        """The engine waits for requests, for as long as it takes."""
        os.pwrite(self.fd, _TURNS.pack(self._num_turns, 0), _TURNS_AT)

    def begin(self, plan: StepPlan) -> None:
        """A step is about to be launched."""
        self._steps.append([item.request_id for item in plan.scheduled])
        self._write_steps()

    def end(self) -> None:
        """The oldest step in flight is done, and its results are taken in."""
        self._steps.popleft()
        self._write_steps()

    def _write_steps(self) -> None:
        if not self._steps:
            os.pwrite(self.fd, _LENGTH.pack(0), _STEP_AT)
            return
        ids = _encode([request_id for step in self._steps for request_id in step])
        os.pwrite(self.fd, _LENGTH.pack(len(ids)) + ids, _STEP_AT)

    # -- the supervisor's side

    def read(self) -> Reading:
        data = os.pread(self.fd, _STEP_AT, 0).ljust(_STEP_AT, b"\0")
        (num_beats,) = _BEATS.unpack_from(data)
        num_turns, is_working = _TURNS.unpack_from(data, _TURNS_AT)
        return Reading(num_beats, num_turns, bool(is_working))

    def executing(self) -> frozenset[str]:
        """Requests in the steps that were in flight when this was last written."""
        head = os.pread(self.fd, _LENGTH.size, _STEP_AT).ljust(_LENGTH.size, b"\0")
        (length,) = _LENGTH.unpack(head)
        if not length:
            return frozenset()
        try:
            return frozenset(_decode(os.pread(self.fd, length, _STEP_AT + _LENGTH.size)))
        except msgspec.MsgspecError:  # it died while it wrote: before the step
            return frozenset()


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[str]).decode
