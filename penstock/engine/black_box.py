"""BlackBox: records what an engine is doing in memory that outlives the engine.

The engine writes and its supervisor reads. Neither waits for the other. The contents survive the
engine, however it ends.
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
SIZE = 4 * 2**20  # bytes; pages that are never written use no memory

_BEATS = struct.Struct("<Q")
_TURNS = struct.Struct("<QQ")  # number of turns, whether one is in progress
_LENGTH = struct.Struct("<Q")  # bytes of the ids that follow
_TURNS_AT = _BEATS.size
_LENGTH_AT = _TURNS_AT + _TURNS.size
_IDS_AT = _LENGTH_AT + _LENGTH.size


class Reading(NamedTuple):
    """Signs of life. If the numbers stop changing, the engine hangs."""

    num_beats: int  # of the heartbeat thread
    num_turns: int  # of the engine's loop
    is_working: bool  # inside a turn, not waiting for requests


class BlackBox:
    """Memory that an engine and its supervisor share through an inherited file descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, SIZE)
        self._num_beats = 0
        self._num_turns = 0
        self._steps: deque[list[str]] = deque()  # in flight
        self._written: list[str] = []  # the ids in memory, even if the length is 0 now
        self._length = 0  # encoded bytes of these ids

    @classmethod
    def create(cls) -> BlackBox:
        """Create an empty one."""
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
        """Start a heartbeat thread that shows that this process runs."""

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
        """The engine waits for requests. There is no time limit on that."""
        _TURNS.pack_into(self._memory, _TURNS_AT, self._num_turns, 0)

    def begin(self, plan: StepPlan) -> None:
        """A step is about to be launched."""
        self._steps.append([item.request_id for item in plan.scheduled])
        self._write_steps()

    def end(self) -> None:
        """The oldest step in flight is done and its results were applied."""
        self._steps.popleft()
        self._write_steps()

    def _write_steps(self) -> None:
        """Write the ids first and the length last: the ids are valid only with a length."""
        if not self._steps:
            _LENGTH.pack_into(self._memory, _LENGTH_AT, 0)
            return
        ids = self._steps[0] if len(self._steps) == 1 else list(chain.from_iterable(self._steps))
        if ids != self._written:
            _LENGTH.pack_into(self._memory, _LENGTH_AT, 0)
            self._written, encoded = ids, _encode(ids)
            while len(encoded) > SIZE - _IDS_AT:  # far more than ever run at once
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
        """Ids of the requests in the steps that were in flight at the last write."""
        (length,) = _LENGTH.unpack_from(self._memory, _LENGTH_AT)
        if not length:
            return frozenset()
        return frozenset(_decode(self._memory[_IDS_AT : _IDS_AT + length]))


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[str]).decode
