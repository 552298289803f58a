"""MultiProcessExecutor: runs several ranks, each in its own process, in lockstep.

A rank is a process that reads calls from its own socket: a child, or one on another machine
(`nodes.py`, `ray.py`). It exits when the socket closes, so none outlives the engine.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import struct
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.config import EngineConfig
from penstock.executor.base import merge_capabilities
from penstock.executor.calls import NOTHING, Call, CallAnswer, Hello, Raised, Returned
from penstock.executor.finished_jobs import FinishedJobs
from penstock.executor.interrupts import interrupts_held
from penstock.executor.media_content import encodes_media, with_content
from penstock.executor.nodes import NodeListener, framed, free_port
from penstock.executor.routed_experts import with_routed_experts
from penstock.executor.silence import CHECK_S, Silence
from penstock.executor.worker import Worker
from penstock.protocol.calls import decode_result, encode, encode_args
from penstock.protocol.errors import ConfigError, EngineDeadError, ModelError, PenstockError
from penstock.protocol.processes import module_command
from penstock.protocol.step import StepMasks, StepPlan, StepResult, settled

if TYPE_CHECKING:
    from penstock.executor.ray import RayRanks

CLOSE_TIMEOUT_S = 10.0
EXIT_TIMEOUT_S = 5.0  # from the closing of a rank's socket to its end
FAILURE_GRACE_S = 5.0
"""How long the other ranks have to answer after a step failed on one rank. Ranks that fail for the
same reason fail at the same time. Any other rank would wait in a collective forever."""
HANG_UP = getattr(select, "POLLRDHUP", select.POLLHUP)
SEND_TIMEOUT_S = 0.001
"""How long a send may block. A rank that is computing does not read, and a rank that waits for a
failed one never will. What was not sent is sent later, while waiting for answers."""


class MultiProcessExecutor:
    """Sends every call to all ranks. The results of a step are those of one rank.

    With pipeline stages, a step's tokens and drafts go to all other stages when it is collected. A
    stage on a CPU computes while it reads a call. So it is asked for the result of a step at once,
    and does not compute the next one first.
    """

    def __init__(self, config: EngineConfig) -> None:
        parallel = config.parallel
        size = parallel.num_ranks
        self._ray: RayRanks | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-")
        self._processes: list[subprocess.Popen[bytes]] = []  # of this machine: the first ranks
        self._hosts: list[str] = []  # by rank: the machine, if it is another one
        self._connections: list[Connection] = []  # for receiving
        self._sockets: list[socket.socket] = []  # the same sockets, for sending
        self._unsent: list[bytearray] = []  # by rank
        self._silences: dict[int, Silence] = {}  # by rank, of those on other machines
        self._due: deque[str] = deque()  # methods of calls without answers from all ranks
        self._results: dict[int, Any] = {}  # by rank, of the first of these calls
        self._num_stages = parallel.pipeline_parallel_size
        self._num_tp = parallel.tensor_parallel_size
        self._first_of_last = size - self._num_tp  # rank that reports
        self._collects_early = False
        self._finished_jobs = FinishedJobs()
        self._decoder = msgspec.msgpack.Decoder(CallAnswer)
        try:
            config, rendezvous, places = self._start_ranks(config)
            for rank, unsent in enumerate(self._unsent):
                hello = Hello(config, rank, rendezvous, *places[rank])
                unsent += framed(encode(hello))
            self._due.append("capabilities")
            self._flush()
            self.capabilities = merge_capabilities(self._gather(), self._num_stages)
            self._collects_early = self._num_stages > 1 and self.capabilities.device == "cpu"
        except BaseException:
            self.close()
            raise

    def _start_ranks(self, config: EngineConfig) -> tuple[EngineConfig, str, list[tuple[int, int]]]:
        """Start all ranks, or wait for them.

        Returns their configuration, where they rendezvous, and each one's number among those of its
        machine, and how many these are.
        """
        parallel = config.parallel
        if parallel.distributed_executor_backend == "ray":
            self._ray = _open_ray(config)
            for end, host in self._ray.connect():
                self._add(end, host)
            return self._ray.config, self._ray.rendezvous, self._ray.local_places()
        num_local = parallel.ranks_per_node
        for _ in range(num_local):
            self._spawn()
        rendezvous = f"file://{Path(self._folder.name) / 'store'}"
        if parallel.nnodes > 1:
            rendezvous = self._add_nodes(config)
        places = [(rank % num_local, num_local) for rank in range(parallel.num_ranks)]
        return config, rendezvous, places

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        command = module_command("penstock.executor.rank", str(theirs.fileno()))
        process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C must not reach the ranks
        )
        theirs.close()
        self._processes.append(process)
        self._add(ours, "")

    def _add_nodes(self, config: EngineConfig) -> str:
        """Wait for the ranks of other machines. Returns where all ranks rendezvous."""
        listener = NodeListener(config)
        try:
            for end, host in listener.accept():
                self._add(end, host)
        finally:
            listener.close()
        address = config.parallel.master_addr
        return f"tcp://{address}:{free_port(address)}"

    def _add(self, ours: socket.socket, host: str) -> None:
        if host:
            self._silences[len(self._hosts)] = Silence(ours)
        self._hosts.append(host)
        timeout = struct.pack("@ll", 0, int(SEND_TIMEOUT_S * 1e6))  # seconds, microseconds
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        self._sockets.append(ours)
        self._unsent.append(bytearray())
        self._connections.append(Connection(os.dup(ours.fileno())))

    def launch(self, plan: StepPlan) -> None:
        self._send_plan(plan, range(len(self._hosts)))
        if self._collects_early and not plan.masked:
            self._send("collect", (), is_answered=True)

    def _send_plan(self, plan: StepPlan, ranks: range) -> None:
        """Have these ranks launch a step. The first of them, a stage, encode media."""
        # The files are on this machine.
        remote = [rank for rank in ranks[: self._num_tp] if self._hosts[rank]]
        if remote and encodes_media(plan):
            self._send("launch", (with_content(plan),), ranks=remote)
            self._send("launch", (plan,), ranks=[rank for rank in ranks if rank not in remote])
        else:
            self._send("launch", (plan,), ranks=ranks)

    def sample(self, masks: StepMasks | None) -> None:
        self._send("sample", (masks,))
        if self._collects_early:
            self._send("collect", (), is_answered=True)

    def collect(self) -> StepResult:
        results: list[StepResult]
        results = self._gather() if self._collects_early else self._call("collect")
        reported = results[self._first_of_last :]  # by the last stage, which hears of all failures
        if len({result.failure for result in reported}) > 1:
            reason = f"a step failed on some of {len(results)} workers and not on others"
            raise self._kill(EngineDeadError(reason))
        assert len({result.step_id for result in results}) == 1, "ranks are out of step"
        jobs = self._finished_jobs.merge([result.finished_jobs for result in results])
        result = reported[0]
        if self._num_stages > 1 and result.failure is None:
            self._settle(result)
            result = with_routed_experts(results[:: self._num_tp])
        if jobs == result.finished_jobs:
            return result
        return msgspec.structs.replace(result, finished_jobs=jobs)

    def _settle(self, result: StepResult) -> None:
        """Give the tokens of a step to the stages that did not sample them."""
        ranks = range(self._first_of_last)
        self._send("settle", (result.step_id, settled(result)), ranks=ranks)

    def call(self, method: str, *args: Any) -> Any:
        if method == "reset":
            self._finished_jobs.clear()
        return self._call(method, *args)[0]

    def _call(self, method: str, *args: Any) -> list[Any]:
        """Return the results of all ranks. First gathers those of an interrupted call."""
        while self._due:
            self._gather()
        self._send(method, args, is_answered=True)
        return self._gather()

    def check_alive(self) -> None:
        for rank, process in enumerate(self._processes):
            if process.poll() is not None:
                raise self._death(rank)
        poll = select.poll()
        remote = self._connections[len(self._processes) :]
        for connection in remote:
            poll.register(connection.fileno(), HANG_UP)
        if remote and (gone := poll.poll(0)):
            fds = [connection.fileno() for connection in self._connections]
            raise self._death(fds.index(gone[0][0]))
        self._check_silences()

    def _check_silences(self) -> None:
        """Raise if the machine of a rank is gone. Otherwise send what the next check waits for."""
        for rank, silence in self._silences.items():
            if silence.is_too_long():
                raise self._kill(
                    EngineDeadError(
                        f"worker {rank} of {len(self._connections)} on {self._hosts[rank]} died: "
                        "the machine, or the network to it, is gone"
                    )
                )
            if not self._unsent[rank]:
                self._unsent[rank] += framed(NOTHING)
        if self._silences:
            self._flush()

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for end in self._sockets:
            end.close()
        for process in self._processes:
            try:
                process.wait(CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._connections, self._sockets, self._processes = [], [], []
        if self._ray is not None:
            self._ray.close()
            self._ray = None
        self._folder.cleanup()

    def _send(
        self,
        method: str,
        args: tuple[Any, ...],
        is_answered: bool = False,
        ranks: Iterable[int] | None = None,
    ) -> None:
        """Send a call to these ranks, or to all."""
        call = Call(method, [*map(msgspec.Raw, encode_args(args))], is_answered)
        message = framed(encode(call))
        with interrupts_held():
            for rank in range(len(self._unsent)) if ranks is None else ranks:
                self._unsent[rank] += message
            if is_answered:
                self._due.append(method)
            self._flush()

    def _flush(self) -> None:
        """Send as much as the ranks accept without blocking."""
        with interrupts_held():
            for rank, unsent in enumerate(self._unsent):
                try:
                    while unsent:
                        del unsent[: self._sockets[rank].send(unsent)]
                except BlockingIOError:
                    pass
                except OSError:
                    raise self._death(rank) from None

    def _gather(self) -> list[Any]:
        """Wait for every rank's answer to the first call due. Raises at once if a rank dies."""
        method = self._due[0]
        deadline: float | None = None
        while len(self._results) < len(self._connections):
            for rank in self._wait(deadline):
                with interrupts_held():
                    result = self._receive(rank, getattr(Worker, method))
                    self._results[rank] = result
                if isinstance(result, StepResult) and result.failure and deadline is None:
                    deadline = time.monotonic() + FAILURE_GRACE_S
        with interrupts_held():
            results, self._results = self._results, {}
            self._due.popleft()
        return [results[rank] for rank in range(len(self._connections))]

    def _wait(self, deadline: float | None) -> list[int]:
        """Wait until at least one missing rank has answered. Returns these ranks."""
        missing: dict[int, int] = {}  # rank by file descriptor
        others: dict[int, int] = {}
        for rank, connection in enumerate(self._connections):
            (others if rank in self._results else missing)[connection.fileno()] = rank
        while True:
            poll = select.poll()
            for fd in missing:
                poll.register(fd, select.POLLIN)
            for fd in others:
                poll.register(fd, HANG_UP)
            for end, unsent in zip(self._sockets, self._unsent, strict=True):
                if unsent:
                    poll.register(end, select.POLLOUT)
            left = math.inf if deadline is None else max(deadline - time.monotonic(), 0.0)
            wait_s = min(left, CHECK_S) if self._silences else left
            events = poll.poll(None if wait_s == math.inf else wait_s * 1000)
            if ready := [missing[fd] for fd, _ in events if fd in missing]:
                return ready
            if died := [others[fd] for fd, _ in events if fd in others]:
                raise self._death(died[0])
            if not events and wait_s == left:
                late = list(missing.values())
                reason = f"a step failed, and workers {late} did not come back from it"
                raise self._kill(EngineDeadError(reason))
            self._check_silences()
            self._flush()

    def _receive(self, rank: int, method: Callable[..., Any]) -> Any:
        try:
            answer = self._decoder.decode(self._connections[rank].recv_bytes())
        except (EOFError, OSError):
            raise self._death(rank) from None
        if isinstance(answer, Raised):
            raise self._kill(_revive(answer, rank))
        assert isinstance(answer, Returned)
        return decode_result(method, answer.value)

    def _death(self, rank: int) -> PenstockError:
        """Kill all ranks. Return the last error of the dead rank, or its exit code as an error."""
        with contextlib.suppress(EOFError, OSError):
            while self._connections[rank].poll():
                answer = self._decoder.decode(self._connections[rank].recv_bytes())
                if isinstance(answer, Raised):
                    return self._kill(_revive(answer, rank))
        worker = f"worker {rank} of {len(self._connections)}"
        if host := self._hosts[rank]:
            return self._kill(EngineDeadError(f"{worker} on {host} died"))
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._processes[rank].wait(EXIT_TIMEOUT_S)
        return self._kill(EngineDeadError(f"{worker} died (exit code {code})"))

    def _kill(self, error: PenstockError) -> PenstockError:
        """Kill all ranks: some may wait forever for another one. Returns `error`."""
        for process in self._processes:
            process.kill()
        for end in self._sockets[len(self._processes) :]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # it exits, even if it is stuck
        return error


def _open_ray(config: EngineConfig) -> RayRanks:
    try:
        from penstock.executor.ray import RayRanks  # an extra, and takes a second
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            "distributed_executor_backend=ray needs Ray: pip install 'penstock[ray]' on all nodes"
        ) from error
    return RayRanks(config)


def _revive(raised: Raised, rank: int) -> PenstockError:
    """Turn a rank's error message back into an exception."""
    known: Sequence[type[PenstockError]] = (ConfigError, ModelError)
    for error_class in known:
        if error_class.__name__ == raised.kind:
            return error_class(raised.error)
    return EngineDeadError(f"worker {rank} failed: {raised.error}")
