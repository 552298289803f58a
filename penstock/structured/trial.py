"""Grammars are tried out in a process of their own first, under limits of time and memory.

Compiling is native code that cannot be interrupted. In a process that may be killed, whatever a
client thought of costs it an error, and the engine nothing; what has passed here is then compiled
in the engine. ``python -m penstock.structured.checker FD`` serves that socket.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np

from penstock.protocol.errors import InputError, PenstockError
from penstock.protocol.structured import FIELD, StructuredOutputsParams
from penstock.structured.backend import Backend, Bits, make_backend
from penstock.structured.schemas import read_schema
from penstock.structured.tags import tool_schemas
from penstock.structured.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

MEMORY_LIMIT = 2**30  # bytes that compiling one grammar may take
START_TIMEOUT_S = 120.0
CLOSED = "the engine is closed; no more grammars are checked"


class Setup(msgspec.Struct, tag=True):
    """The first message to a checker."""

    backend: str
    vocabulary: Vocabulary
    timeout_s: float


class Check(msgspec.Struct, tag=True):
    params: StructuredOutputsParams


class Ready(msgspec.Struct, tag=True):
    pass


class Passed(msgspec.Struct, tag=True):
    lowered: str  # what `Backend.compile` takes


class Refused(msgspec.Struct, tag=True):
    error: str
    field: str = FIELD


Answer = Ready | Passed | Refused
TOO_MUCH = (InputError, RecursionError, MemoryError)
_decode_answer = msgspec.msgpack.Decoder(Answer).decode
_decode_question = msgspec.msgpack.Decoder(Setup | Check).decode


class Checker:
    """The other side of such a process, which it starts when it is needed.

    For one thread; `end` may be called from any.
    """

    def __init__(self, backend: str, vocabulary: Vocabulary, timeout_s: float) -> None:
        self._setup = Setup(backend, vocabulary, timeout_s)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._is_over = False
        self._lock = threading.Lock()  # of that, and of starting the process
        self._in_use = threading.Lock()

    def check(self, params: StructuredOutputsParams) -> str:
        """What the backend compiles. Raises `InputError` for what is wrong or too much work."""
        with self._in_use:
            return self._check(params)

    def _check(self, params: StructuredOutputsParams) -> str:
        timeout_s = self._setup.timeout_s
        try:
            answer = self._ask(Check(params), timeout_s)
        except TimeoutError:
            self.close()
            raise InputError(
                f"{FIELD}.{params.kind} is too complex: it takes more than {timeout_s:g} s to "
                "compile",
                FIELD,
            ) from None
        except (EOFError, OSError):
            self.close()
            if self._is_over:
                raise PenstockError(CLOSED) from None
            raise InputError(
                f"{FIELD}.{params.kind} is too complex: compiling it takes more memory than the "
                f"{MEMORY_LIMIT // 2**20} MiB that it may",
                FIELD,
            ) from None
        if isinstance(answer, Refused):
            raise InputError(answer.error, answer.field)
        assert isinstance(answer, Passed)
        return answer.lowered

    def _ask(self, question: Check, timeout_s: float) -> Answer:
        if self._connection is None:
            self._start()
        assert self._connection is not None
        self._connection.send_bytes(msgspec.msgpack.encode(question))
        return self._receive(timeout_s)

    def _receive(self, timeout_s: float) -> Answer:
        assert self._connection is not None
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        answer: Answer = _decode_answer(self._connection.recv_bytes())
        return answer

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "penstock.structured.checker", str(theirs.fileno())]
        with ours, theirs, self._lock:
            if self._is_over:
                raise PenstockError(CLOSED)
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal is for the engine alone
            )
            self._connection = Connection(ours.detach())
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(self._setup))
            answer = self._receive(START_TIMEOUT_S)
        except (EOFError, OSError, TimeoutError) as error:
            self.close()
            raise PenstockError(f"the process that checks grammars did not start: {error!r}") from (
                error
            )
        assert isinstance(answer, Ready)

    def close(self) -> None:
        """End the process. Another is started if there is something to check again."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None

    def end(self) -> None:
        """End the process for good, from any thread: what is being checked fails at once."""
        with self._lock:
            self._is_over = True
            process = self._process
        if process is not None:
            process.kill()
        with self._in_use:  # the connection belongs to whoever is waiting for an answer
            self.close()


def serve(connection: Connection) -> None:
    """Answer questions until the engine closes the connection."""
    setup = _decode_question(connection.recv_bytes())
    assert isinstance(setup, Setup)
    backend = make_backend(setup.backend, setup.vocabulary)
    bits = np.zeros((1, -(-len(setup.vocabulary) // 32)), dtype=np.int32)
    limit_memory(MEMORY_LIMIT)

    def answer(message: Answer) -> None:
        connection.send_bytes(msgspec.msgpack.encode(message))

    answer(Ready())
    while True:
        question = _decode_question(connection.recv_bytes())
        assert isinstance(question, Check)
        # If the engine dies meanwhile, nobody kills this process: the alarm does.
        signal.setitimer(signal.ITIMER_REAL, setup.timeout_s + 1.0)
        try:
            answer(_try(backend, question.params, bits))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)


def _try(backend: Backend, params: StructuredOutputsParams, bits: Bits) -> Passed | Refused:
    try:
        lowered = backend.lower(params)
        matcher = backend.compile(lowered).matcher()
        backend.fill([matcher], bits)
        if matcher.error is not None:
            raise InputError(f"{FIELD} cannot be used: {matcher.error}", FIELD)
        if not bits.any():
            raise InputError(f"{FIELD} cannot be used: no text matches it", FIELD)
        return Passed(lowered)
    except TOO_MUCH as error:
        refused = Refused(str(error) or f"{FIELD} is too complex: {type(error).__name__}")
    with contextlib.suppress(*TOO_MUCH):  # what is refused need not be well-formed
        return _blame_tool(backend, params, bits) or refused
    return refused


def _blame_tool(backend: Backend, params: StructuredOutputsParams, bits: Bits) -> Refused | None:
    """Why the schema of one of the tools is refused, where what is refused holds tools."""
    if params.kind != "structural_tag":
        return None
    tag = read_schema(params.structural_tag, f"{FIELD}.structural_tag")
    for name, schema in tool_schemas(tag.get("format") if isinstance(tag, dict) else None):
        alone = StructuredOutputsParams(json=schema, lenient=True)
        found = _try(backend, alone, bits)
        if isinstance(found, Refused):
            what = f"the parameters of the tool {name!r}"
            why = found.error.replace(f"{FIELD}.json", what).replace(FIELD, what)
            return Refused(why, "tools")
    return None


def limit_memory(num_bytes: int) -> None:
    """Let this process take so much more than it has now, where the system can see to that."""
    status = Path("/proc/self/statm")
    if not status.exists():
        logger.warning("The memory that grammars take is not limited on this system")
        return
    import resource

    used = int(status.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, used + num_bytes))


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        serve(connection)  # until the engine is gone, and so is the need for this process


if __name__ == "__main__":
    main()
