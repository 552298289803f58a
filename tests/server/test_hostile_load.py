"""Hostile requests while good streams run: nothing fails, nothing changes, nothing grows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from faults.tiny_checkpoint import make_tiny_checkpoint
from hostile import NUM_GOOD, Attack, Report, resident_bytes
from server_process import SMALL, ServerProcess
from waiting import eventually

MAX_BODY = 2**20
FLAGS = (
    *("--max-request-body-bytes", str(MAX_BODY), "--request-read-timeout-s", "6"),
    *("--slow-reader-timeout-s", "2", "--max-stored-response-bytes", "4MiB"),
)


def attack(server: ServerProcess, count: int, seed: int) -> Report:
    pids = [server.process.pid, server.engine_pid]
    hostile = Attack(server.port, count, seed, lambda: [*map(resident_bytes, pids)], MAX_BODY)
    report = asyncio.run(hostile.run())
    print(
        f"\n{report.num_hostile} hostile requests, {report.num_good} good streams, "
        f"{report.num_changed} changed; answers {dict(report.statuses)}; memory in MiB "
        f"{[(count, *(size >> 20 for size in sizes)) for count, sizes in report.memory]}"
    )
    assert report.num_hostile >= count
    assert report.num_good >= NUM_GOOD
    assert report.num_changed == 0
    assert report.server_errors == []
    assert server.process.pid in pids
    assert server.engine_pid in pids, "the engine was not even started again"
    eventually(server.is_idle)
    return report


def test_hostile_requests_neither_harm_the_server_nor_its_good_clients(tmp_path: Path) -> None:
    model = str(make_tiny_checkpoint(tmp_path))
    server = ServerProcess(model, *FLAGS, *SMALL)
    try:
        attack(server, count=150, seed=1)
    finally:
        server.close()


def use_the_whole_cache(server: ServerProcess, num_tokens: int) -> None:
    """Memory of the KV cache counts as used from its first use on: use it before the attack."""
    for start in range(0, num_tokens, 1900):
        prompt = [7 + (start + i) * 31 % 40_000 for i in range(1900)]
        answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
        assert answer.status_code == 200


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_hostile_requests_leave_no_trace(default_model: str) -> None:
    server = ServerProcess(
        default_model,
        *("--kv-cache-memory-bytes", "128MiB", "--max-model-len", "2048"),
        *("--cpu-threads", "1", *FLAGS),
    )
    try:
        use_the_whole_cache(server, num_tokens=6500)  # of 46 KB or half of that: above 128 MiB
        report = attack(server, count=10_000, seed=2)
        growth = report.growth_after(0.1)
        print(f"memory grew by {growth:.2%} after the first 1,000")
        assert growth < 0.05
    finally:
        server.close()
