"""EngineHandle: owns one engine process: its socket, its black box, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from penstock.config import EngineConfig
from penstock.engine import messages
from penstock.engine.black_box import BlackBox, Reading
from penstock.engine.messages import EngineInfo, Outputs
from penstock.protocol.processes import module_command

logger = logging.getLogger(__name__)

SOCKET_NAME = "engine"
CLOSE_TIMEOUT_S = 10.0
LAST_WORDS_TIMEOUT_S = 10.0  # for the reason of an engine that failed by itself
SILENCE_S = 0.02  # after this, no more messages arrive from a dead engine
LOOK_INTERVAL_S = 0.25
POLLIN = int(zmq.POLLIN)  # an int is faster than the enum
LOADING_PATIENCE = 4  # factor on the heartbeat timeout while the engine loads


@dataclass(frozen=True)
class Death:
    """How an engine ended and what it was doing."""

    how: str  # such as "signal 9"
    failure: messages.EngineFailed | None  # its last message, if it sent one
    executing: frozenset[str]  # requests in the steps that were in flight
    uptime_s: float | None  # since its model was loaded; None if it never was

    def __str__(self) -> str:
        return self.how if self.failure is None else f"{self.how}: {self.failure.error}"


class HangWatch:
    """Detects a hang: signs of life that no longer change.

    Time counts only while this watch runs, too. If the machine slept or this process was stopped,
    that time is not held against the engine.
    """

    def __init__(self, heartbeat_timeout_s: float, step_timeout_s: float) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._step_timeout_s = step_timeout_s
        self._last = Reading(0, 0, False)
        self._looked_at: float | None = None
        self._without_beat_s = 0.0
        self._in_turn_s = 0.0

    def look(self, reading: Reading, is_ready: bool, now: float) -> str | None:
        """Return why the engine counts as hung, or None. Call it every `LOOK_INTERVAL_S`."""
        elapsed_s = 0.0 if self._looked_at is None else now - self._looked_at
        elapsed_s = min(elapsed_s, 2 * LOOK_INTERVAL_S)
        last, self._last, self._looked_at = self._last, reading, now
        has_beaten = reading.num_beats != last.num_beats
        self._without_beat_s = 0.0 if has_beaten else self._without_beat_s + elapsed_s
        is_stuck = reading.is_working and reading.num_turns == last.num_turns
        self._in_turn_s = self._in_turn_s + elapsed_s if is_stuck else 0.0
        # Loading libraries may block all other threads, the heartbeat included.
        limit_s = self._heartbeat_timeout_s * (1 if is_ready else LOADING_PATIENCE)
        if self._without_beat_s > limit_s:
            return f"no sign of life for {limit_s:g} s"
        if self._in_turn_s > self._step_timeout_s:
            return f"a step took longer than {self._step_timeout_s:g} s"
        return None


class EngineHandle:
    """Starts one engine process. Each engine process has its own handle.

    So messages of different engines cannot be confused. `on_ready` is called once the model is
    loaded, before `on_outputs`, which gets all outputs in order. Neither is called after `death`
    is done.
    """

    def __init__(
        self,
        on_ready: Callable[[EngineInfo], None],
        on_outputs: Callable[[Outputs], None],
        hang_watch: HangWatch,
    ) -> None:
        """Start the process. It imports its modules in the background.

        Raises OSError if the system has no process, memory or file descriptor left.
        """
        self.info: EngineInfo | None = None
        self._on_ready = on_ready
        self._on_outputs = on_outputs
        self._hang_watch = hang_watch
        self._hang: str | None = None
        self._loop = asyncio.get_running_loop()
        self.death: asyncio.Future[Death] = self._loop.create_future()
        self._connected: asyncio.Future[None] = self._loop.create_future()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._ready_at: float | None = None
        self._failure: messages.EngineFailed | None = None
        self._has_exited = False
        self._is_heard = True
        with contextlib.ExitStack() as on_failure:
            self._open(on_failure)
            self._give_back = on_failure.pop_all().close
        self._loop.add_reader(self._socket.fileno(), self._receive)
        self._looking = asyncio.ensure_future(self._look_for_hangs())
        threading.Thread(target=self._wait_for_exit, name="engine-watch", daemon=True).start()

    def _open(self, stack: contextlib.ExitStack) -> None:
        """Open the socket and the black box and start the process. `stack` releases them."""
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-"))
        stack.callback(self._remove_socket_file)
        self._box = BlackBox.create()
        stack.callback(self._box.close)
        address = f"ipc://{self._folder / SOCKET_NAME}"
        try:
            context = zmq.Context()
            stack.callback(context.destroy, linger=0)
            self._socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
            self._socket.set_hwm(0)
            self._socket.bind(address)
        except zmq.ZMQError as error:  # not an OSError, though it has an errno
            raise OSError(error.errno, f"no socket to an engine: {error}") from error
        self.process = subprocess.Popen(
            module_command("penstock.engine.process", address, str(self._box.fd)),
            stdin=subprocess.PIPE,  # it exits when this pipe closes, however this process ends
            pass_fds=[self._box.fd],
            start_new_session=True,  # a terminal's Ctrl-C must not reach it
        )

    @property
    def is_ready(self) -> bool:
        return self.info is not None and not self._has_exited

    async def load(self, config: EngineConfig) -> EngineInfo | None:
        """Load the model in the engine. Returns None if the engine dies."""
        await self._unless_dead(self._connected)
        if not self.death.done():
            self.send(messages.LOAD, messages.encode(config))
            await self._unless_dead(self._ready)
        return None if self.death.done() else self.info

    async def _unless_dead(self, news: asyncio.Future[None]) -> None:
        either: set[asyncio.Future[Any]] = {news, self.death}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)

    async def died(self) -> Death:
        """Wait until it has ended. Returns how."""
        return await asyncio.shield(self.death)

    def send(self, *frames: bytes) -> None:
        """Send a message. Does nothing if the engine is dead."""
        if self._has_exited:
            return
        # Without a high-water mark a send to a live peer never blocks. If it would block, the
        # engine is gone and its death is about to be noticed.
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(frames, zmq.DONTWAIT)
        self._loop.call_soon(self._receive)  # a send may clear zmq's readiness signal

    async def close(self) -> None:
        """Stop the process, cleanly if it is connected."""
        if self._connected.done():
            self.send(messages.CLOSE)
        else:
            self.kill()
        await asyncio.wait({self.death}, timeout=CLOSE_TIMEOUT_S)
        self.kill()
        await self.died()

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()  # SIGKILL also ends a stopped process

    # -- its messages

    def _receive(self) -> None:
        """Handle all messages that have arrived. zmq signals once for any number of them."""
        while not self._has_exited and (frame := self._next_frame()):
            self._take(frame)

    def _next_frame(self) -> bytes | None:
        has_come = int(self._socket.get(zmq.EVENTS)) & POLLIN  # faster than catching zmq.Again
        return self._socket.recv(zmq.DONTWAIT) if has_come else None

    def _take(self, frame: bytes) -> None:
        """Handle a message. If that fails, kill the engine and ignore what else it says.

        Otherwise it would look healthy while its requests wait forever.
        """
        if not self._is_heard:
            return
        try:
            self._handle(messages.decode_message(frame))
        except Exception:
            self._is_heard = False  # later messages would leave a gap
            logger.critical(
                "The engine's messages could not be processed; killing the engine", exc_info=True
            )
            self.kill()

    def _handle(self, answer: messages.EngineMessage) -> None:
        if isinstance(answer, messages.Outputs):
            self._on_outputs(answer)
        elif isinstance(answer, messages.Connected):
            self._remove_socket_file()
            self._connected.set_result(None)
        elif isinstance(answer, messages.Ready):
            self.info, self._ready_at = answer.info, time.monotonic()
            self._ready.set_result(None)
            self._on_ready(answer.info)
        else:
            self._failure = answer

    def _remove_socket_file(self) -> None:
        """Remove the socket's file. The connection does not need it any more."""
        with contextlib.suppress(OSError):
            (self._folder / SOCKET_NAME).unlink(missing_ok=True)
            self._folder.rmdir()  # unlike shutil.rmtree, needs no file descriptor

    # -- its end

    async def _look_for_hangs(self) -> None:
        while self._hang is None:
            await asyncio.sleep(LOOK_INTERVAL_S)
            reading, now = self._box.read(), time.monotonic()
            self._hang = self._hang_watch.look(reading, self.info is not None, now)
        logger.error("The engine hangs (%s); killing it", self._hang)
        self.kill()

    def _wait_for_exit(self) -> None:
        code = self.process.wait()
        with contextlib.suppress(RuntimeError):  # the loop may be closed already
            self._loop.call_soon_threadsafe(
                lambda: asyncio.ensure_future(self._on_exit(code), loop=self._loop)
            )

    async def _on_exit(self, code: int) -> None:
        self._has_exited = True
        self._loop.remove_reader(self._socket.fileno())
        self._looking.cancel()
        await asyncio.gather(self._looking, return_exceptions=True)
        await self._hear_last_words(may_have_some=code == 1)
        ready_at, now = self._ready_at, time.monotonic()
        death = Death(
            how=self._hang or (f"signal {-code}" if code < 0 else f"exit code {code}"),
            failure=self._failure,
            executing=self._box.executing(),
            uptime_s=None if ready_at is None else now - ready_at,
        )
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._give_back()
        self.death.set_result(death)

    async def _hear_last_words(self, may_have_some: bool) -> None:
        """Handle the messages that it sent before it died."""
        deadline = time.monotonic() + LAST_WORDS_TIMEOUT_S
        while True:
            frame = self._next_frame()
            if frame is None:
                await asyncio.sleep(SILENCE_S)
                frame = self._next_frame()
            if frame is not None:
                self._take(frame)
                continue
            is_expected = may_have_some and self._is_heard and self._failure is None
            if not is_expected or time.monotonic() > deadline:
                return
