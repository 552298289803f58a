"""A rank of an engine is killed under streams: the group restarts, and every answer is whole."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
from faults.streams import Body, Streams
from server_process import ServerProcess, children_of
from structured.byte_model import VOCAB_SIZE, make_byte_tokenizer
from tiny_models import make_checkpoint

from penstock.executor.nodes import free_port

SEEDED: Body = {"prompt": "Once", "max_tokens": 150, "seed": 1, "temperature": 0.9}
KINDS: list[Body] = [
    {"prompt": "One, two,", "max_tokens": 150, "temperature": 0, "ignore_eos": True},
    {**SEEDED, "ignore_eos": True, "n": 2},
    {**SEEDED, "ignore_eos": True, "logprobs": 2},
    {**SEEDED, "structured_outputs": {"regex": "([a-z]{3} )*"}},
]
FLAGS = ["--cpu-threads", "1", "--kv-cache-memory-bytes", str(16 << 20), "--max-model-len", "256"]


def make_model(folder: Path, variant: str = "llama") -> Path:
    model = make_checkpoint(folder, variant, vocab_size=VOCAB_SIZE, max_position_embeddings=256)
    make_byte_tokenizer().save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text('{"eos_token": "</s>", "bos_token": "<s>"}')
    return model


Fault = Callable[[], None]


def check_faults(server: ServerProcess, faults: Iterable[Fault]) -> None:
    """Streams during the faults are those of a calm run. Each comes under streams, and ends the
    engine."""
    calm = Streams(server).run(KINDS)
    assert all(answer.error is None and answer.num_ends == 1 for answer in calm)
    num_faults = 0

    async def happen(streams: Streams) -> None:
        nonlocal num_faults
        for fault in faults:
            enough = streams.num_tokens + 60
            await streams.until(lambda: streams.num_tokens >= enough)  # noqa: B023
            engine = server.engine_pid
            await asyncio.to_thread(fault)
            num_faults += 1
            await streams.until(lambda: server.engine_pids() not in ({engine}, set()))  # noqa: B023
            async with server.async_client(timeout=240) as client:
                while (await client.get("/health")).status_code != 200:
                    await asyncio.sleep(0.05)

    streams = Streams(server, timeout_s=300)
    for answers, undisturbed in zip(streams.run_during(KINDS, happen), calm, strict=True):
        assert answers
        assert all(answer == undisturbed for answer in answers)
    restarts = [
        line for line in server.get("/metrics").text.splitlines() if "restarts_total" in line
    ]
    assert any(line.endswith(f" {num_faults}.0") for line in restarts), restarts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "ranks"),
    [
        ("llama", ["-pp", "2"]),
        ("llama", ["-tp", "2"]),
        ("mixtral", ["-dp", "2", "--enable-expert-parallel"]),
    ],
    ids=lambda value: "".join(value),
)
def test_kills_of_single_ranks_change_nothing(
    variant: str, ranks: list[str], tmp_path: Path
) -> None:
    with ServerProcess(str(make_model(tmp_path, variant)), *FLAGS, *ranks) as server:

        def kill(rank: int) -> None:
            os.kill(sorted(children_of(server.engine_pid))[rank], signal.SIGKILL)

        check_faults(server, [partial(kill, 0), partial(kill, 1)])


@pytest.mark.slow
def test_kills_of_a_rank_and_of_a_node_change_nothing(tmp_path: Path) -> None:
    """Both nodes are this machine. The dead one comes again."""
    model = make_model(tmp_path)
    ranks = ["-pp", "2", "--nnodes", "2", "--master-port", str(free_port("127.0.0.1"))]
    flags = [*FLAGS, *ranks]

    def start_node() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "penstock", "serve", str(model), *flags]
        return subprocess.Popen([*command, "--node-rank", "1"])

    nodes = [start_node()]
    try:
        with ServerProcess(str(model), *flags) as server:

            def kill_rank() -> None:
                (rank,) = children_of(nodes[-1].pid)
                os.kill(rank, signal.SIGKILL)

            def kill_node() -> None:
                pids = [nodes[-1].pid, *children_of(nodes[-1].pid)]
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                nodes[-1].wait()
                nodes.append(start_node())

            check_faults(server, [kill_rank, kill_node])
            assert server.has_logged(f"on {socket.gethostname()} died")
    finally:
        for node in nodes:
            node.terminate()
            node.wait()
