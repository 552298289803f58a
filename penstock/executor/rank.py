"""A rank's process: `main` serves calls from the socket whose file descriptor it is given."""

from __future__ import annotations

import logging
import os
import select
import socket
import sys
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection

import msgspec

from penstock.distributed.mesh import Mesh, join_mesh, leave_mesh
from penstock.executor.calls import NOTHING, Call, CallAnswer, Hello, Raised, Returned
from penstock.executor.silence import RANK_CHECK_S, Silence
from penstock.executor.worker import Worker
from penstock.loading.source import resolve_source
from penstock.observability.logs import setup_logging
from penstock.platforms.platform import Platform, detect_platform
from penstock.protocol.calls import encode, run_method
from penstock.protocol.errors import PenstockError

logger = logging.getLogger(__name__)

GRACE_S = 3.0  # for a clean shutdown after the engine has gone


def serve(connection: Connection) -> None:
    """Run calls until the engine closes the connection."""

    def answer(message: CallAnswer) -> None:
        connection.send_bytes(encode(message))

    hello = msgspec.msgpack.decode(connection.recv_bytes(), type=Hello)
    observability = hello.config.observability
    level = observability.log_level if hello.rank == 0 else "error"
    setup_logging(level, observability.log_format)
    platform = detect_platform(hello.config.device, hello.local_rank, hello.local_size)
    parallel = hello.config.parallel
    mesh = join_mesh(
        hello.rank, parallel.tensor_parallel_size, parallel.pipeline_parallel_size,
        hello.rendezvous, platform.backend, parallel.enable_expert_parallel,
        parallel.num_lanes,
    )  # fmt: skip
    mesh = with_peers(mesh, platform)
    decoder = msgspec.msgpack.Decoder(Call)
    try:
        source = resolve_source(hello.config.model, hello.config.load)
        worker = Worker(hello.config, source, platform, mesh)
        answer(Returned(msgspec.Raw(encode(worker.capabilities()))))
        while True:
            if (message := connection.recv_bytes()) == NOTHING:
                continue
            call = decoder.decode(message)
            result = run_method(worker, call.method, call.args)
            if call.is_answered:
                answer(Returned(msgspec.Raw(encode(result))))
    except PenstockError as error:
        answer(Raised(str(error), type(error).__name__))
    finally:
        leave_mesh(mesh)


def with_peers(mesh: Mesh, platform: Platform) -> Mesh:
    """Let tensor-parallel ranks on GPUs read each other's memory, if the GPUs can."""
    group = mesh.tp.process_group
    if platform.device.type != "cuda" or group is None:
        return mesh
    from penstock.ops.triton.peers import SHARED_GPU_BYTES, open_peers  # needs Triton

    # What does not fit is not captured where ranks share a GPU: there is no NCCL.
    max_bytes = SHARED_GPU_BYTES if platform.backend == "gloo" else None
    peers = open_peers(group, platform.device, max_bytes)
    return replace(mesh, tp=replace(mesh.tp, peers=peers))


def exit_with_engine(fd: int) -> None:
    """Exit `GRACE_S` after the engine has gone, even if this process is stuck in a step."""

    def watch() -> None:
        hang_up = select.poll()
        hang_up.register(fd, getattr(select, "POLLRDHUP", select.POLLHUP))
        with socket.socket(fileno=os.dup(fd)) as end:
            is_remote, silence = end.family != socket.AF_UNIX, Silence(end)
            while not hang_up.poll(RANK_CHECK_S * 1000 if is_remote else None):
                if silence.is_too_long():
                    break
        time.sleep(GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="engine-watch", daemon=True).start()


def serve_socket(fd: int) -> None:
    """Serve the engine at the other end of this socket, until it closes it."""
    exit_with_engine(fd)
    connection = Connection(fd)
    try:
        serve(connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the engine is gone
    except PenstockError as error:  # before the rank has joined the others
        connection.send_bytes(encode(Raised(str(error), type(error).__name__)))
    except Exception as error:
        logger.exception("Rank failed")
        connection.send_bytes(encode(Raised(repr(error), type(error).__name__)))
        raise


def main() -> None:
    serve_socket(int(sys.argv[1]))
