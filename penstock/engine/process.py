"""The engine process: `main` serves a socket. It is given the address and a file descriptor.

The file is the black box, in which the engine records what it is doing. Standard input is a pipe
that is never written to. When it closes, the parent is gone and this process exits at once, even
in the middle of a step.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from penstock.engine import messages
from penstock.engine.black_box import BlackBox
from penstock.engine.heap import HeapTrimmer, settled_heap
from penstock.engine.messages import (
    CallResult,
    EngineFailed,
    EngineInfo,
    EngineMessage,
    EngineStats,
    Outputs,
    Ready,
)
from penstock.protocol.calls import run_method
from penstock.protocol.delta import EngineDelta, FinishReason
from penstock.protocol.errors import InputError, PenstockError
from penstock.protocol.processes import collector_at_rest
from penstock.protocol.request import EngineRequest

if TYPE_CHECKING:
    from penstock.engine.core import EngineCore

logger = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.1
LINGER_MS = 1000  # for sending the last message
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # options of Linux's prctl
PROCESS_NAME = b"penstock-engine"  # shown by top from the load on; the maximum length
IDLE_CHECK_MS = 250  # between checks for dead workers while idle; steps find them otherwise
STALLED_WAIT_MS = 1  # polling interval while all requests wait at a gate


class EngineServer:
    """Alternates between handling messages and running steps until it is closed."""

    def __init__(self, socket: zmq.Socket[bytes], core: EngineCore, box: BlackBox) -> None:
        self._socket = socket
        self._core = core
        self._box = box
        core.watch(box)
        self._decode_request = msgspec.msgpack.Decoder(EngineRequest).decode
        self._deltas: list[EngineDelta] = []
        self._calls: list[CallResult] = []
        self._closing = False
        self._num_steps = 0
        self._step_tokens: list[int] = []  # since the stats were sent
        self._stats_sent_at = 0.0
        self._stats_are_stale = True
        self._heap = HeapTrimmer()

    def serve(self) -> None:
        while not self._closing:
            self._receive(wait_ms=self._patience())
            self._box.work()
            if self._core.has_work():
                self._step()
                self._stats_are_stale = True
            self._send()

    def _step(self) -> None:
        num_before = self._core.num_scheduled_tokens
        self._deltas += self._core.step()
        num_tokens = self._core.num_scheduled_tokens - num_before
        if num_tokens:  # 0 if it only collected
            self._step_tokens.append(num_tokens)
            self._num_steps += 1

    def _patience(self) -> int | None:
        """How long to wait for a message: 0 with work to do, None (forever) without."""
        if not self._core.has_work():
            self._box.rest()
            return None
        stats = self._core.stats()
        is_stalled = not stats.num_running and not stats.num_steps_in_flight
        return STALLED_WAIT_MS if is_stalled else 0

    def _receive(self, wait_ms: int | None) -> None:
        """Handle all messages. Wait up to `wait_ms` for the first one (None: forever)."""
        while wait_ms is None and not self._socket.poll(IDLE_CHECK_MS):
            self._core.executor.check_alive()
        while self._socket.poll(wait_ms):
            self._box.work()
            kind, *frames = self._socket.recv_multipart()
            self._handle(kind, frames)
            wait_ms = 0

    def _handle(self, kind: bytes, frames: list[bytes]) -> None:
        if kind == messages.ADD:
            self._add(frames[0].decode(), frames[1])
        elif kind == messages.FINISH:
            finish = messages.decode_finish(frames[0])
            self._deltas += self._core.abort(finish.request_ids)
            self._stats_are_stale = True
        elif kind == messages.CALL:
            self._call(int(frames[0]), frames[1].decode(), frames[2:])
        elif kind == messages.CLOSE:
            self._closing = True
        else:
            raise AssertionError(f"unknown message {kind!r}")

    def _add(self, request_id: str, body: bytes) -> None:
        field = None
        try:
            self._core.add(self._decode_request(body))
            return
        except (msgspec.MsgspecError, InputError) as error:
            logger.warning("Request %s was rejected: %s", request_id, error)
            field = error.field if isinstance(error, InputError) else None
            message = str(error)
        except Exception:  # it has not run yet, so no other request is affected
            logger.exception("Request %s could not be added", request_id)
            self._core.abort([request_id])
            message = "the engine failed to take this request in"
        self._deltas.append(
            EngineDelta(
                request_id=request_id,
                finish_reason=FinishReason.ERROR,
                error=message,
                error_field=field,
            )
        )

    def _call(self, call_id: int, method: str, args: list[bytes]) -> None:
        """Run a method of the core. If it returns a future, answer once that is done."""
        try:
            value = run_method(self._core, method, args)
        except PenstockError as error:
            self._calls.append(CallResult.of_error(call_id, error))
            return
        if isinstance(value, Future):
            value.add_done_callback(functools.partial(self._answer, call_id))
        else:
            self._calls.append(CallResult(call_id, msgspec.Raw(messages.encode(value))))

    def _answer(self, call_id: int, done: Future[Any]) -> None:
        try:
            value = msgspec.Raw(messages.encode(done.result()))
            self._calls.append(CallResult(call_id, value))
        except PenstockError as error:
            self._calls.append(CallResult.of_error(call_id, error))

    def _send(self) -> None:
        stats = self._stats_if_due()
        if self._deltas or self._calls or stats is not None:
            cache = self._core.take_cache_update()
            send(self._socket, Outputs(self._deltas, self._calls, stats, cache))
            self._deltas, self._calls = [], []
        if stats is not None:
            self._heap.trim_if_due()

    def _stats_if_due(self) -> EngineStats | None:
        now = time.monotonic()
        is_due = now - self._stats_sent_at >= STATS_INTERVAL_S or not self._core.has_work()
        if not (is_due and self._stats_are_stale):
            return None
        self._stats_sent_at, self._stats_are_stale = now, False
        step_tokens, self._step_tokens = self._step_tokens, []
        return EngineStats(
            scheduler=self._core.stats(),
            num_steps=self._num_steps,
            step_tokens=step_tokens,
            metrics=self._core.take_metrics(),
            adapters=self._core.adapter_stats(),
            speculation=self._core.speculation_stats(),
        )


def send(socket: zmq.Socket[bytes], answer: EngineMessage) -> None:
    socket.send(messages.encode(answer))


def run(socket: zmq.Socket[bytes], box: BlackBox) -> None:
    """Load the model from the first message's config, then serve."""
    send(socket, messages.Connected())
    with collector_at_rest():  # import torch while waiting for the config
        from penstock.engine.build import build_engine
        from penstock.loading.source import resolve_source
        from penstock.observability.logs import setup_logging

    kind, *frames = socket.recv_multipart()
    if kind == messages.CLOSE:
        return
    assert kind == messages.LOAD
    prctl(PR_SET_NAME, PROCESS_NAME)
    config = messages.decode_config(frames[0])
    setup_logging(config.observability.log_level, config.observability.log_format)
    core = build_engine(config, resolve_source(config.model, config.load))
    try:
        send(socket, Ready(core_info(core)))
        with settled_heap():
            EngineServer(socket, core, box).serve()
    finally:
        core.close()


def core_info(core: EngineCore) -> EngineInfo:
    pooling = core.executor.capabilities.pooling
    return EngineInfo(core.limits, core.num_kv_blocks, pooling, core.scheduler.kv.prefix_keys)


def exit_with_parent(address: str) -> None:
    """Exit as soon as standard input closes, even in the middle of a step."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(sys.stdin.fileno(), 1):
                pass
        folder = Path(address.removeprefix("ipc://")).parent
        shutil.rmtree(folder, ignore_errors=True)  # left over if the start was interrupted
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a stopped process cannot watch stdin


def prctl(option: int, value: int | bytes) -> None:
    """Call Linux's prctl. Does nothing on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def main() -> int:
    address, box = sys.argv[1], BlackBox(int(sys.argv[2]))
    box.start_beating()
    exit_with_parent(address)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C and drains first
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.set_hwm(0)  # no limit: never drop a message
    socket.connect(address)
    try:
        run(socket, box)
        return 0
    except PenstockError as error:
        send(socket, EngineFailed(str(error), type(error).__name__))
    except Exception as error:
        logger.exception("The engine failed")
        send(socket, EngineFailed(f"{type(error).__name__}: {error}", type(error).__name__))
    finally:
        context.destroy(linger=LINGER_MS)
    return 1
