"""Ranks on several machines: node 0 runs the engine, and the other nodes join it over TCP.

A node connects once for each of its ranks, says what it is (`Join`) and hands the socket to the
rank's process. From then on this rank is served like a local one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import msgspec

from penstock.config import EngineConfig, ParallelConfig
from penstock.executor.calls import Join, JoinAnswer, Raised, Welcome
from penstock.protocol.calls import encode
from penstock.protocol.errors import ConfigError
from penstock.protocol.processes import module_command
from penstock.protocol.version import VERSION

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 300.0  # for all nodes to join after the first is there
RETRY_S = 0.2
MAX_JOIN_BYTES = 2**20
KEEPALIVE_S = 1  # seconds between probes of a silent node; three without an answer end it
OWN_OPTIONS = {"node_rank", "log_level", "log_format"}  # that may differ between nodes


def use_tcp(end: socket.socket) -> None:
    """Send small messages at once, and notice a machine that is gone, if `Silence` does not."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", KEEPALIVE_S), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def differences(own: EngineConfig, other: EngineConfig) -> list[str]:
    """Options in which two nodes differ, such as ``max_num_seqs=8 there and 16 here``."""
    found = []
    for section in EngineConfig.sections():
        ours, theirs = getattr(own, section), getattr(other, section)
        for field in dataclasses.fields(ours):
            here, there = getattr(ours, field.name), getattr(theirs, field.name)
            if here != there and field.name not in OWN_OPTIONS:
                found.append(f"{field.name}={there!r:.100} there and {here!r:.100} here")
    return found


class NodeListener:
    """On node 0: takes in the ranks of the other nodes."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        parallel = config.parallel
        address = (parallel.master_addr, parallel.master_port)
        try:
            self._socket = socket.create_server(address, family=_family(*address))
        except OSError as error:
            raise ConfigError(
                f"node 0 cannot listen at {address[0]}:{address[1]} ({error.strerror or error}): "
                "master_addr must be an address of this machine, and master_port a free port"
            ) from error

    def accept(self) -> list[tuple[socket.socket, str]]:
        """The sockets of all remote ranks, in order, and their machines. Raises ConfigError."""
        parallel = self._config.parallel
        first, missing = parallel.ranks_per_node, set(range(1, parallel.nnodes))
        joined: dict[int, tuple[socket.socket, str]] = {}
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        logger.info("Waiting for nodes %s at port %d", _numbers(missing), parallel.master_port)
        try:
            while len(joined) < parallel.num_ranks - first:
                self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
                end, _ = self._socket.accept()
                if (join := self._read(end)) is None:
                    end.close()
                    continue
                rank = join.node_rank * first + join.local_rank
                if rank in joined:
                    self._refuse(end, f"node {join.node_rank} has joined already: check node_rank")
                    continue
                end.sendall(framed(encode(Welcome())))
                use_tcp(end)
                joined[rank] = end, join.host
                ranks = range(join.node_rank * first, (join.node_rank + 1) * first)
                if all(each in joined for each in ranks):
                    missing.discard(join.node_rank)
                    logger.info("Node %d has joined from %s", join.node_rank, join.host)
        except TimeoutError:
            self._close(joined)
            raise ConfigError(
                f"node {_numbers(missing)} did not join within {JOIN_TIMEOUT_S:.0f} s: start "
                f"penstock serve there with the same options and its --node-rank, and check that "
                f"{parallel.master_addr}:{parallel.master_port} can be reached from there"
            ) from None
        except BaseException:
            self._close(joined)
            raise
        return [joined[rank] for rank in sorted(joined)]

    def close(self) -> None:
        self._socket.close()

    def _close(self, joined: dict[int, tuple[socket.socket, str]]) -> None:
        for end, _ in joined.values():
            end.close()

    def _read(self, end: socket.socket) -> Join | None:
        """Who has connected; None if it is no node. Raises ConfigError if it cannot take part."""
        join = read_join(end)
        if join is None:
            return None
        if reason := self._mismatch(join):
            self._refuse(end, reason)
            raise ConfigError(reason)
        return join

    def _mismatch(self, join: Join) -> str | None:
        who = f"node {join.node_rank} ({join.host})"
        if join.version != VERSION:
            return (
                f"{who} runs Penstock {join.version}, node 0 runs {VERSION}: install the "
                "same version on all nodes"
            )
        try:
            config = msgspec.convert(join.config, EngineConfig)
        except (msgspec.MsgspecError, ConfigError) as error:
            return f"{who} was started with other options: {error}"
        if found := differences(self._config, config):
            return f"{who} was started with other options than node 0: {'; '.join(found[:5])}"
        parallel = self._config.parallel
        if not 1 <= join.node_rank < parallel.nnodes:
            return f"{who}: node_rank must be 1 to {parallel.nnodes - 1}"
        return None

    def _refuse(self, end: socket.socket, reason: str) -> None:
        with contextlib.suppress(OSError):
            end.sendall(framed(encode(Raised(reason, ConfigError.__name__))))
        end.close()


def read_join(end: socket.socket) -> Join | None:
    """Who has connected. Anybody may: None if it is no node."""
    end.settimeout(10.0)
    connection = Connection(os.dup(end.fileno()))
    try:
        if not select.select([end], [], [], 10.0)[0]:
            return None
        return msgspec.msgpack.decode(connection.recv_bytes(MAX_JOIN_BYTES), type=Join)
    except (OSError, EOFError, msgspec.MsgspecError):
        return None
    finally:
        connection.close()
        with contextlib.suppress(OSError):
            end.settimeout(None)


def run_node(config: EngineConfig) -> int:
    """Run this node's ranks for the engine on node 0, and again for each engine that follows it.

    Ends with an error if node 0 cannot be reached, or refuses this node.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    parallel = config.parallel
    while True:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for end in _join(config):
                with end:
                    processes.append(_start_rank(end))
            logger.info("Node %d has joined node 0", parallel.node_rank)
            for process in processes:
                process.wait()
            logger.info("The engine has ended: waiting for the next one")
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _join(config: EngineConfig) -> Iterator[socket.socket]:
    """A socket to node 0 for each rank of this node."""
    parallel, deadline = config.parallel, time.monotonic() + JOIN_TIMEOUT_S
    for local_rank in range(parallel.ranks_per_node):
        join = Join(
            version=VERSION,
            config=msgspec.to_builtins(config),
            node_rank=parallel.node_rank,
            local_rank=local_rank,
            host=socket.gethostname(),
        )
        yield _join_one(parallel, join, deadline)


def _join_one(parallel: ParallelConfig, join: Join, deadline: float) -> socket.socket:
    address, has_said = (parallel.master_addr, parallel.master_port), False
    while True:
        try:
            end = socket.create_connection(address, timeout=10.0)
            end.settimeout(None)
            use_tcp(end)
            end.sendall(framed(encode(join)))
            connection = Connection(os.dup(end.fileno()))
            with connection:
                answer = msgspec.msgpack.decode(connection.recv_bytes(), type=JoinAnswer)
        except (OSError, EOFError) as error:
            reason = getattr(error, "strerror", None) or error or "it closed the connection"
            left = deadline - time.monotonic()
            if left <= 0:
                raise ConfigError(
                    f"node 0 cannot be reached at {address[0]}:{address[1]} ({reason}): check "
                    "--master-addr, --master-port and that node 0 runs"
                ) from error
            if not has_said:
                has_said = True
                logger.info("Waiting up to %.0f s for node 0 at %s:%d (%s)", left, *address, reason)
            time.sleep(RETRY_S)
            continue
        if isinstance(answer, Raised):
            raise ConfigError(answer.error)
        return end


def _start_rank(end: socket.socket) -> subprocess.Popen[bytes]:
    fd = end.fileno()
    command = module_command("penstock.executor.rank", str(fd))
    return subprocess.Popen(
        command, pass_fds=[fd], stdin=subprocess.DEVNULL, start_new_session=True
    )


def framed(message: bytes) -> bytes:
    """Frame a message for `Connection.recv_bytes`."""
    return len(message).to_bytes(4, "big", signed=True) + message


def free_port(address: str) -> int:
    """A port that is free now."""
    with socket.create_server((address, 0), family=_family(address, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _family(address: str, port: int) -> socket.AddressFamily:
    found: list[Any] = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    family: socket.AddressFamily = found[0][0]
    return family


def _numbers(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
