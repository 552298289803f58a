"""Channel: messages between the parent and an API process, over a pair of connected sockets.

Each message has its length in front. Messages of one side arrive in order. Calls are of methods
that the other side lists, typed by their annotations. All of it is msgpack.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

import msgspec

from penstock.protocol.calls import encode_args, run_method
from penstock.protocol.delta import EngineDelta, FinishReason
from penstock.protocol.errors import (
    ConfigError,
    CrashFault,
    EngineDeadError,
    InputError,
    ModelError,
    PenstockError,
    RequestFault,
)
from penstock.protocol.request import EngineRequest
from penstock.server.http.errors import NotFound

logger = logging.getLogger(__name__)

LENGTH_BYTES = 4
T = TypeVar("T")


class Problem(msgspec.Struct, array_like=True):
    """An error of the other side."""

    kind: str
    message: str
    field: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Problem:
        kind = next((item for item in KINDS if isinstance(error, item)), RequestFault)
        if not isinstance(error, PenstockError):
            return cls(kind.__name__, "the server failed; see its log")
        return cls(kind.__name__, str(error), getattr(error, "field", None))

    def error(self) -> PenstockError:
        kind = next(item for item in KINDS if item.__name__ == self.kind)
        if issubclass(kind, InputError | NotFound):
            return kind(self.message, self.field or "")
        return kind(self.message)


# The most specific first.
KINDS: tuple[type[PenstockError], ...] = (
    NotFound, InputError, CrashFault, RequestFault, EngineDeadError, ModelError, ConfigError,
)  # fmt: skip


class DeltaBatch(msgspec.Struct, tag=0, array_like=True):
    """To an API process: what is new about its requests."""

    deltas: list[EngineDelta]


class Failed(msgspec.Struct, tag=1, array_like=True):
    """To an API process: a request of it has failed."""

    request_id: str
    problem: Problem


class Add(msgspec.Struct, tag=2, array_like=True):
    """To the parent: run these."""

    requests: list[EngineRequest]
    rank: int | None
    session: str | None


class FinishRequests(msgspec.Struct, tag=3, array_like=True):
    """To the parent: these have ended early."""

    request_ids: list[str]
    reason: FinishReason


class ApiCall(msgspec.Struct, tag=4, array_like=True):
    """Run a method. Without a number, there is no answer."""

    number: int | None
    method: str
    args: list[bytes]


class Cancel(msgspec.Struct, tag=5, array_like=True):
    """Nobody waits for this call's answer any more."""

    number: int


class CallReply(msgspec.Struct, tag=6, array_like=True):
    number: int
    value: bytes = b"\xc0"  # nil
    problem: Problem | None = None


Message = DeltaBatch | Failed | Add | FinishRequests | ApiCall | Cancel | CallReply

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode


class Channel(asyncio.Protocol):
    """One end. Methods of `target` can be called by the other end: plain ones in order with all
    messages, coroutines beside them.

    `take` gets the messages that are no calls. `on_end` is called when the other end is gone.
    """

    def __init__(
        self, target: object, take: Callable[[Message], None], on_end: Callable[[], None]
    ) -> None:
        self._target = target
        self._take = take
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._running: dict[int, asyncio.Task[None]] = {}  # calls of the other end

    async def open(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: self, sock)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # -- sending

    def send(self, message: Message) -> None:
        """Send a message, in order. Does nothing if the other end is gone."""
        if self._transport is not None and not self._transport.is_closing():
            body = encode(message)
            self._transport.write(len(body).to_bytes(LENGTH_BYTES, "big") + body)

    def tell(self, method: str, *args: Any) -> None:
        """Have the other end run a method, without an answer."""
        self.send(ApiCall(None, method, encode_args(args)))

    async def call(self, result: type[T] | Any, method: str, *args: Any) -> T:
        """Have the other end run a method. Returns its result, which has the type `result`."""
        if self._transport is None or self._transport.is_closing():
            raise EngineDeadError("the process is gone")
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self.send(ApiCall(number, method, encode_args(args)))
        try:
            value = await answer
        except asyncio.CancelledError:
            self.send(Cancel(number))
            raise
        finally:
            del self._answers[number]
        return msgspec.msgpack.decode(value, type=result)

    # -- receiving

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses

    def connection_lost(self, error: Exception | None) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineDeadError("the process is gone"))
        for task in self._running.values():
            task.cancel()
        self._on_end()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        buffer, begin = self._buffer, 0
        while len(buffer) - begin >= LENGTH_BYTES:
            body = begin + LENGTH_BYTES
            end = body + int.from_bytes(buffer[begin:body], "big")
            if end > len(buffer):
                break
            message = decode(bytes(buffer[body:end]))
            begin = end
            self._handle(message)
        del buffer[:begin]

    def _handle(self, message: Message) -> None:
        if isinstance(message, ApiCall):
            self._on_call(message)
        elif isinstance(message, CallReply):
            self._on_answer(message)
        elif isinstance(message, Cancel):
            if message.number in self._running:
                self._running[message.number].cancel()
        else:
            self._take(message)

    def _on_answer(self, message: CallReply) -> None:
        answer = self._answers.get(message.number)
        if answer is None or answer.done():
            return
        if message.problem is None:
            answer.set_result(message.value)
        else:
            answer.set_exception(message.problem.error())

    def _on_call(self, call: ApiCall) -> None:
        try:
            value = run_method(self._target, call.method, call.args)
        except PenstockError as error:
            if call.number is not None:
                self.send(CallReply(call.number, problem=Problem.of(error)))
            return
        if inspect.isawaitable(value):
            assert call.number is not None, "coroutines are called, not told"
            task = asyncio.ensure_future(self._answer(call.number, value))
            self._running[call.number] = task
        elif call.number is not None:
            self.send(CallReply(call.number, encode(value)))

    async def _answer(self, number: int, work: Awaitable[Any]) -> None:
        try:
            answer = CallReply(number, encode(await work))
        except PenstockError as error:
            answer = CallReply(number, problem=Problem.of(error))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            logger.exception("A call failed")
            answer = CallReply(number, problem=Problem.of(error))
        finally:
            del self._running[number]
        self.send(answer)
