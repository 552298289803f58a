"""Several ranks, each in a process of its own, that step together.

A rank is a child process that reads commands from a socket of its own and ends when that socket
closes, so no child outlives the engine. Commands and results are msgpack: nothing is unpickled.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

import msgspec

from penstock.config import EngineConfig
from penstock.executor.base import Capabilities
from penstock.protocol.errors import ConfigError, EngineDeadError, ModelError, PenstockError
from penstock.protocol.kv import KVCacheLayout
from penstock.protocol.step import StepMasks, StepPlan, StepResult

CLOSE_TIMEOUT_S = 10.0


class Hello(msgspec.Struct, tag=True):
    """The first message to a rank: who it is and what to load."""

    config: EngineConfig
    rank: int
    size: int
    store_path: str


class Start(msgspec.Struct, tag=True):
    layout: KVCacheLayout
    max_model_len: int


class Step(msgspec.Struct, tag=True):
    plan: StepPlan


class Masks(msgspec.Struct, tag=True):
    """Follows a `Step` whose plan is `masked`."""

    masks: StepMasks


class Loaded(msgspec.Struct, tag=True):
    """A rank's first answer, once its model is loaded."""

    capabilities: Capabilities


class Started(msgspec.Struct, tag=True):
    pass


class Done(msgspec.Struct, tag=True):
    result: StepResult


class Failed(msgspec.Struct, tag=True):
    error: str
    kind: str  # the name of the error's class


Command = Hello | Start | Step | Masks
Answer = Loaded | Started | Done | Failed


class MultiProcessExecutor:
    """Sends every command to all ranks; the first rank's answers count."""

    def __init__(self, config: EngineConfig) -> None:
        size = config.parallel.tensor_parallel_size
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._answers: dict[int, Answer] = {}  # by rank, to the oldest command not yet gathered
        self._decoder = msgspec.msgpack.Decoder(Answer)
        try:
            for _ in range(size):
                self._spawn()
            store_path = str(Path(self._folder.name) / "store")
            for rank, connection in enumerate(self._connections):
                hello = Hello(config, rank, size, store_path)
                connection.send_bytes(msgspec.msgpack.encode(hello))
            answers = self._gather()
            loaded = [answer for answer in answers if isinstance(answer, Loaded)]
            assert len(loaded) == size
        except BaseException:
            self.close()
            raise
        self.capabilities = loaded[0].capabilities

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "penstock.executor.rank", str(theirs.fileno())]
        process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal is for us alone
        )
        theirs.close()
        self._processes.append(process)
        self._connections.append(Connection(ours.detach()))

    def start(self, layout: KVCacheLayout, max_model_len: int) -> None:
        self._broadcast(Start(layout, max_model_len))
        self._gather()

    def launch(self, plan: StepPlan) -> int:
        self._broadcast(Step(plan))
        return plan.step_id

    def sample(self, handle: int, masks: StepMasks | None = None) -> None:
        """Ranks sample as soon as they have logits, and masks if there are to be any."""
        if masks is not None:
            self._broadcast(Masks(masks))

    def collect(self, handle: int) -> StepResult:
        answer = self._gather()[0]
        assert isinstance(answer, Done)
        assert answer.result.step_id == handle
        return answer.result

    def check_alive(self) -> None:
        for rank, process in enumerate(self._processes):
            if process.poll() is not None:
                raise self._death(rank)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            try:
                process.wait(CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._connections, self._processes = [], []
        self._folder.cleanup()

    def _broadcast(self, command: Command) -> None:
        message = msgspec.msgpack.encode(command)
        for rank, connection in enumerate(self._connections):
            try:
                connection.send_bytes(message)
            except OSError:
                raise self._death(rank) from None

    def _gather(self) -> list[Answer]:
        """One answer from every rank; the death of any is seen at once.

        If it is interrupted, the next call goes on with the answers that are there.
        """
        ranks = {id(connection): rank for rank, connection in enumerate(self._connections)}
        while len(self._answers) < len(self._connections):
            missing = [c for c in self._connections if ranks[id(c)] not in self._answers]
            for ready in wait(missing):
                assert isinstance(ready, Connection)
                rank = ranks[id(ready)]
                try:
                    answer = self._decoder.decode(ready.recv_bytes())
                except (EOFError, OSError):
                    raise self._death(rank) from None
                if isinstance(answer, Failed):
                    raise _revive(answer, rank)
                self._answers[rank] = answer
        answers, self._answers = self._answers, {}
        return [answers[rank] for rank in range(len(self._connections))]

    def _death(self, rank: int) -> EngineDeadError:
        code = self._processes[rank].poll()
        return EngineDeadError(f"worker {rank} of {len(self._processes)} died (exit code {code})")


def _revive(failed: Failed, rank: int) -> PenstockError:
    """A rank's error as it would have been raised here."""
    known: Sequence[type[PenstockError]] = (ConfigError, ModelError)
    for error_class in known:
        if error_class.__name__ == failed.kind:
            return error_class(failed.error)
    return EngineDeadError(f"worker {rank} failed: {failed.error}")
