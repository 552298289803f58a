"""Ranks on several machines, all of them this one: joining, refusals, tokens, and a death."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from lost_network import lose_all
from server.server_process import children_of
from tiny_engine import OPTIONS, greedy_tokens, open_llm, random_prompts
from tiny_models import make_checkpoint
from waiting import eventually

from penstock import LLM
from penstock.config import EngineConfig
from penstock.executor import nodes
from penstock.executor.base import Capabilities, merge_capabilities
from penstock.executor.calls import Join
from penstock.executor.multi_process import MultiProcessExecutor
from penstock.executor.nodes import NodeListener, free_port
from penstock.executor.silence import PAUSE_S, Silence
from penstock.protocol.errors import ConfigError, EngineDeadError
from penstock.protocol.limits import StepLimits
from penstock.protocol.version import VERSION

PROMPTS = random_prompts(3, 2, 9, 33)


def config_of(**options: Any) -> EngineConfig:
    known: dict[str, Any] = {"tensor_parallel_size": 2, "nnodes": 2, **options}
    return EngineConfig.from_options(known)


def join_with(change: Callable[[Join], Join], **options: Any) -> tuple[str, str]:
    """What both nodes say if the other one is different."""
    port = free_port("127.0.0.1")
    ours = config_of(master_port=port)
    theirs = config_of(master_port=port, node_rank=1, **options)
    join = change(Join(VERSION, msgspec.to_builtins(theirs), 1, 0, "far"))
    listener, said = NodeListener(ours), []

    def try_to_join() -> None:
        try:
            nodes._join_one(theirs.parallel, join, deadline=0.0).close()
        except ConfigError as error:
            said.append(str(error))

    thread = threading.Thread(target=try_to_join)
    thread.start()
    try:
        with pytest.raises(ConfigError) as refused:
            listener.accept()
    finally:
        thread.join()
        listener.close()
    return str(refused.value), said[0]


def test_nodes_with_other_options_are_named_on_both_sides() -> None:
    here, there = join_with(lambda join: join, max_num_seqs=7, log_level="debug")
    assert here == there
    assert "node 1 (far)" in here
    assert "max_num_seqs=7 there and None here" in here
    assert "log_level" not in here


def test_nodes_of_other_versions_are_named() -> None:
    here, there = join_with(lambda join: msgspec.structs.replace(join, version="9.9"))
    assert here == there
    assert f"node 1 (far) runs Penstock 9.9, node 0 runs {VERSION}" in here


def test_a_rank_with_another_checkpoint_is_named() -> None:
    limits = StepLimits(max_num_seqs=1, max_num_batched_tokens=1, max_model_len=2)
    rank = Capabilities(limits, "float32", {}, 1, fingerprint="a")
    other = dataclasses.replace(rank, fingerprint="b")
    with pytest.raises(ConfigError, match="rank 1 and rank 0 have different checkpoints"):
        merge_capabilities([rank, other])
    with pytest.raises(ConfigError, match="stage 0 and stage 1 have different checkpoints"):
        merge_capabilities([rank, other], 2)
    other = dataclasses.replace(rank, limits=msgspec.structs.replace(limits, max_num_seqs=3))
    with pytest.raises(ConfigError, match=r"different limits \(max_num_seqs\)"):
        merge_capabilities([rank, other])


def test_a_node_that_does_not_come_is_named_and_strangers_are_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nodes, "JOIN_TIMEOUT_S", 0.3)
    port = free_port("127.0.0.1")
    listener = NodeListener(config_of(master_port=port))
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        stranger.shutdown(socket.SHUT_WR)
        with pytest.raises(ConfigError, match=r"node 1 did not join .*--node-rank"):
            listener.accept()
    listener.close()


def test_a_node_0_that_is_not_there_is_named_while_it_is_awaited_and_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = config_of(master_port=free_port("127.0.0.1"), node_rank=1)
    join = Join(VERSION, {}, 1, 0, "far")
    with (
        caplog.at_level("INFO"),
        pytest.raises(ConfigError, match=r"node 0 cannot be reached at 127\.0\.0\.1:\d+"),
    ):
        nodes._join_one(config.parallel, join, deadline=time.monotonic() + nodes.RETRY_S)
    (line,) = caplog.messages
    assert line.startswith("Waiting up to 0 s for node 0 at 127.0.0.1:")
    assert "refused" in line


def test_an_address_of_another_machine_cannot_be_node_0s() -> None:
    with pytest.raises(ConfigError, match="master_addr must be an address of this machine"):
        NodeListener(config_of(master_addr="192.0.2.1"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nnodes": 3}, "nnodes must divide the 2 ranks .* got 3: use 1, 2"),
        ({"node_rank": 2}, r"node_rank must be below nnodes \(2\), got 2"),
        ({"data_parallel_size": 2}, "only with enable_expert_parallel: .* a server per replica"),
        (
            {"data_parallel_size": 3, "enable_expert_parallel": True, "nnodes": 4},
            "the 6 ranks .* x data_parallel_size.* got 4: use 1, 2, 3, 6",
        ),
        ({"master_port": 70000}, "master_port must be at most 65535"),
    ],
)
def test_impossible_nodes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(**options)


def test_only_node_0_runs_an_engine(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="node_rank > 0 is for penstock serve"):
        LLM(str(make_checkpoint(tmp_path, "llama")), **OPTIONS, tensor_parallel_size=2,
            nnodes=2, node_rank=1)  # fmt: skip


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    with ours, theirs:
        yield ours, theirs


def test_a_machine_that_acknowledges_nothing_is_gone(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = connection
    silence = Silence(ours)
    ours.sendall(b"before")
    assert theirs.recv(6) == b"before"
    lose_all(theirs)
    ours.sendall(b"after")
    eventually(silence.is_too_long)


def test_a_process_that_reads_nothing_is_not_gone(
    connection: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine acknowledges all that fits into its buffer."""
    ours, _ = connection
    ours.setblocking(False)
    silence, now = Silence(ours), time.monotonic()
    with contextlib.suppress(BlockingIOError):
        while ours.send(bytes(1 << 16)):
            pass
    eventually(lambda: silence._acknowledged_s() is None)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for _ in range(9):
        now += PAUSE_S * 0.9
        assert not silence.is_too_long()


def test_a_pause_of_the_engine_is_no_silence_of_the_others(
    connection: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something was sent at the end of the pause. There was no time to acknowledge it."""
    ours, _ = connection
    silence, now = Silence(ours), time.monotonic()
    monkeypatch.setattr(silence, "_acknowledged_s", lambda: 99.0)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for _ in range(3):
        now += PAUSE_S * 1.1
        assert not silence.is_too_long()
    now += PAUSE_S * 0.9
    assert not silence.is_too_long()
    now += PAUSE_S * 0.9
    assert silence.is_too_long()


def start_node(model: Path, options: dict[str, Any]) -> subprocess.Popen[bytes]:
    """The node that node 0 waits for, with the same options."""
    flags = [f"--{name.replace('_', '-')}" for name in options]
    values = ["" if value is True else str(value) for value in options.values()]
    pairs = [part for pair in zip(flags, values, strict=True) for part in pair if part]
    command = [sys.executable, "-m", "penstock", "serve", str(model), *pairs, "--node-rank", "1"]
    return subprocess.Popen(command)


@pytest.mark.slow
def test_replicas_that_share_experts_may_be_on_two_nodes(tmp_path: Path) -> None:
    model, port = make_checkpoint(tmp_path, "qwen3_moe"), free_port("127.0.0.1")
    with open_llm(model) as llm:
        expected = greedy_tokens(llm, PROMPTS)
    spread = {"data_parallel_size": 2, "enable_expert_parallel": True}
    options = {**OPTIONS, **spread, "nnodes": 2, "master_port": port}
    with start_node(model, options) as node:
        try:
            with LLM(str(model), **options) as llm:
                assert greedy_tokens(llm, PROMPTS) == expected
        finally:
            node.terminate()


def test_stages_on_two_nodes_give_one_ranks_tokens_and_a_death_is_told(tmp_path: Path) -> None:
    """The other node joins the next engine, too."""
    model, port = make_checkpoint(tmp_path, "llama"), free_port("127.0.0.1")
    with open_llm(model) as llm:
        expected = greedy_tokens(llm, PROMPTS)
    options = {**OPTIONS, "pipeline_parallel_size": 2, "nnodes": 2, "master_port": port}
    with start_node(model, options) as node:
        try:
            with LLM(str(model), **options) as llm:
                assert greedy_tokens(llm, PROMPTS) == expected
                (rank,) = children_of(node.pid)
                os.kill(rank, signal.SIGKILL)
                with pytest.raises(EngineDeadError, match=rf"on {socket.gethostname()} died"):
                    greedy_tokens(llm, PROMPTS)
            with LLM(str(model), **options) as llm:
                assert greedy_tokens(llm, PROMPTS) == expected
                executor = llm.engine.executor
                assert isinstance(executor, MultiProcessExecutor)
                lose_all(executor._sockets[1])
                with pytest.raises(EngineDeadError, match="or the network to it, is gone"):
                    greedy_tokens(llm, PROMPTS)
            eventually(lambda: not children_of(node.pid))
        finally:
            node.terminate()
        assert node.wait() == 128 + signal.SIGTERM
