"""Grammars that their senders abandon, or that take forever, hold up nobody else's."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import ServerProcess, children_of, name_of
from waiting import eventually

KEYS = ("attacker", "victim")
KNOWN = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
NUM_ABANDONED = 6  # more than are tried at once


def endless(number: int) -> dict[str, Any]:
    """A schema that would compile for minutes, different from any other, of 191 kB."""
    padding = {"description": f"{number} " + "x" * 190_000}
    return {"type": "integer", "multipleOf": 123456789, "minimum": 0, "maximum": 10**15, **padding}


def body(schema: Any, **fields: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"prompt": "x", "max_tokens": 40, "seed": 7, "response_format": form, **fields}


def post(server: ServerProcess, key: str, content: dict[str, Any]) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return server.post("/v1/completions", content, headers=headers)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


@pytest.fixture
def server(serve_tiny: Callable[..., ServerProcess]) -> ServerProcess:
    flags = ("--structured-outputs-timeout-s", "600", "--max-num-seqs", "32")
    return serve_tiny(*flags, "--api-key", KEYS[0], "--api-key", KEYS[1])


def abandon(server: ServerProcess, number: int) -> None:
    """Send a request and leave before it is answered."""
    with server.client() as client, pytest.raises(httpx.ReadTimeout):
        client.post(
            "/v1/completions",
            json=body(endless(number)),
            headers={"Authorization": f"Bearer {KEYS[0]}"},
            timeout=httpx.Timeout(60.0, read=0.15),
        )


def test_abandoned_grammars_hold_up_neither_known_nor_new_ones(server: ServerProcess) -> None:
    free = {"prompt": "hello", "max_tokens": 200, "seed": 3}
    before = text_of(post(server, "victim", free))
    known = text_of(post(server, "victim", body(KNOWN)))
    with ThreadPoolExecutor(NUM_ABANDONED + 1) as threads:
        beside = threads.submit(post, server, "victim", free)
        leaving = [threads.submit(abandon, server, number) for number in range(NUM_ABANDONED)]
        staying = threads.submit(post, server, "attacker", body(endless(-1), timeout=600))
        for future in leaving:
            future.result()
        assert text_of(post(server, "victim", body(KNOWN))) == known
        assert json.loads(text_of(post(server, "victim", body({"enum": [12]})))) == 12
        assert json.loads(text_of(post(server, "attacker", body({"enum": [13]})))) == 13
        assert text_of(beside.result()) == before
        assert not staying.done()
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGINT)
        server.wait()
        staying.exception()  # it loses its server


def confined_pids(server: ServerProcess) -> list[int]:
    """The processes that try grammars out: children of the engine."""
    pids = children_of(server.engine_pid)
    return [pid for pid in pids if "penstock.confined" in command_of(pid)]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return name_of(pid)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_checker_that_is_killed_or_stopped_makes_no_good_schema_wrong(
    server: ServerProcess, number: signal.Signals
) -> None:
    text_of(post(server, "victim", body(KNOWN)))
    (pid,) = confined_pids(server)
    os.kill(pid, number)
    for _ in range(2):
        assert json.loads(text_of(post(server, "victim", body({"enum": [12]})))) == 12
    eventually(lambda: pid not in confined_pids(server))
