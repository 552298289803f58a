"""BlackBox: what an engine is doing, in memory that outlives the engine.

The engine writes and whoever supervises it reads; neither waits for the other, and what was
written stays there however the engine ends.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import threading
from collections import deque
from itertools import chain
from typing import NamedTuple

import msgspec

from penstock.protocol.step import StepPlan

BEAT_INTERVAL_S = 0.25
SIZE = 4 * 2**20  # pages that are never written to take no memory

_BEATS = struct.Struct("<Q")
_TURNS = struct.Struct("<QQ")  # turns, whether one goes on
_LENGTH = struct.Struct("<Q")  # of the ids that follow
_TURNS_AT = _BEATS.size
_LENGTH_AT = _TURNS_AT + _TURNS.size
_IDS_AT = _LENGTH_AT + _LENGTH.size


class Reading(NamedTuple):
    """Signs of life. Numbers that no longer change are what a hang looks like."""

    num_beats: int  # of a thread that does nothing else
    num_turns: int  # of the engine's loop
    is_working: bool  # in a turn; else it waits for requests


class BlackBox:
    """Shared by an engine and its supervisor through an inherited file descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, SIZE)
        self._num_beats = 0
        self._num_turns = 0
        self._steps: deque[list[str]] = deque()  # in flight
        self._written: list[str] = []  # the ids that are there, whether they count or not
        self._length = 0  # of them

    @classmethod
    def create(cls) -> BlackBox:
        """An empty one."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("penstock-black-box")
        else:
            with tempfile.TemporaryFile(prefix="penstock-") as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, SIZE)
        return cls(fd)

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)

    # -- the engine's side

    def start_beating(self) -> None:
        """Show from now on, from a thread of its own, that this process runs."""

        def beat() -> None:
            while True:
                self._num_beats += 1
                _BEATS.pack_into(self._memory, 0, self._num_beats)
                pause.wait(BEAT_INTERVAL_S)

        pause = threading.Event()
        threading.Thread(target=beat, name="heartbeat", daemon=True).start()

    def work(self) -> None:
        """A turn of the engine's loop begins."""
        self._num_turns += 1
        _TURNS.pack_into(self._memory, _TURNS_AT, self._num_turns, 1)

    def rest(self) -> None:
        """The engine waits for requests, for as long as it takes."""
        _TURNS.pack_into(self._memory, _TURNS_AT, self._num_turns, 0)

    def begin(self, plan: StepPlan) -> None:
        """A step is about to be launched."""
        self._steps.append([item.request_id for item in plan.scheduled])
        self._write_steps()

    def end(self) -> None:
        """The oldest step in flight is done, and its results are taken in."""
        self._steps.popleft()
        self._write_steps()

    def _write_steps(self) -> None:
        """The length comes last: it is what makes the ids count."""
        if not self._steps:
            _LENGTH.pack_into(self._memory, _LENGTH_AT, 0)
            return
        ids = self._steps[0] if len(self._steps) == 1 else list(chain.from_iterable(self._steps))
        if ids != self._written:
            _LENGTH.pack_into(self._memory, _LENGTH_AT, 0)
            self._written, encoded = ids, _encode(ids)
            while len(encoded) > SIZE - _IDS_AT:  # more than anyone runs at once
                ids = ids[: len(ids) // 2]
                encoded = _encode(ids)
            self._length = len(encoded)
            self._memory[_IDS_AT : _IDS_AT + len(encoded)] = encoded
        _LENGTH.pack_into(self._memory, _LENGTH_AT, self._length)

    # -- the supervisor's side

    def read(self) -> Reading:
        (num_beats,) = _BEATS.unpack_from(self._memory)
        num_turns, is_working = _TURNS.unpack_from(self._memory, _TURNS_AT)
        return Reading(num_beats, num_turns, bool(is_working))

    def executing(self) -> frozenset[str]:
        """Requests in the steps that were in flight when this was last written."""
        (length,) = _LENGTH.unpack_from(self._memory, _LENGTH_AT)
        if not length:
            return frozenset()
        return frozenset(_decode(self._memory[_IDS_AT : _IDS_AT + length]))


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[str]).decode
