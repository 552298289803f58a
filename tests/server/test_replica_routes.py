"""Replicas of a real server are restarted, added, removed and given other weights under load."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from faults.saboteur import Fault, seed_of
from faults.streams import Answer, Body, Streams
from faults.subject import GREEDY, Subject, start_subject
from faults.tiny_checkpoint import make_tiny_checkpoint
from safetensors.numpy import load_file, save_file
from server_process import ServerProcess, environment
from tiny_adapters import write_adapter
from waiting import eventually

ADMIN = {"Authorization": "Bearer boss"}
SEEDED: Body = {**GREEDY, "temperature": 1.0, "seed": 11}
BODIES: list[Body] = [
    GREEDY,
    SEEDED,
    {**SEEDED, "n": 2, "logprobs": 2},
    {**SEEDED, "seed": 5},
    {**SEEDED, "model": "a"},
] * 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight[::-1].copy() for name, weight in weights.items()},
              folder / "model.safetensors")  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Flags of a server with an adapter."""
    folder = write_adapter(tmp_path_factory.mktemp("adapters") / "a", seed=0)
    return ("--enable-lora", "--max-loras", "1", "--lora-modules", f"a={folder}")


@pytest.fixture(scope="module")
def subject(
    model: Path, adapter: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    flags = ("-dp", "2", "--admin-api-key", "boss", *adapter)
    subject = start_subject(model, tmp_path_factory.mktemp("two"), *flags)
    with subject.server:
        yield subject


@pytest.fixture(scope="module")
def calm(subject: Subject) -> list[Answer]:
    return Streams(subject.server).run(BODIES)


def change(server: ServerProcess, path: str, **body: Any) -> list[dict[str, Any]]:
    """Ask for a change; the replicas after it."""
    answer = server.post(f"/replicas{path}", body, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    replicas: list[dict[str, Any]] = answer.json()["replicas"]
    return replicas


def penstock(server: ServerProcess, *arguments: str, key: str = "boss") -> tuple[int, str, str]:
    """Run `penstock replicas`; its exit code and what it wrote."""
    command = [sys.executable, "-m", "penstock", "replicas", *arguments]
    command += ["--base-url", server.base_url, "--api-key", key]
    ended = subprocess.run(
        command, capture_output=True, text=True, env=environment({}), timeout=240, check=False
    )
    return ended.returncode, ended.stdout, ended.stderr


def test_a_rolling_restart_fails_no_request(subject: Subject, calm: list[Answer]) -> None:
    server = subject.server
    before = server.engine_pids()

    async def restart(streams: Streams) -> None:
        await streams.until(lambda: streams.num_tokens > 50)
        replicas = await asyncio.to_thread(change, server, "/rolling_restart", timeout_s=0)
        assert [item["state"] for item in replicas] == ["serving", "serving"]

    for answers, undisturbed in zip(Streams(server).run_during(BODIES, restart), calm, strict=True):
        assert all(answer == undisturbed for answer in answers)
    assert not server.engine_pids() & before
    assert len(server.engine_pids()) == 2
    eventually(server.is_idle)


def test_replicas_come_and_go_by_the_command_line(subject: Subject, calm: list[Answer]) -> None:
    server = subject.server
    code, out, err = penstock(server, "add")
    assert code == 0, err
    assert [line.split()[:2] for line in out.splitlines()] == [
        [str(index), "serving"] for index in range(3)
    ]
    assert Streams(server).run(BODIES) == calm
    assert penstock(server, "drain", "0", "--timeout-s", "0")[0] == 0
    assert "0  draining" in penstock(server, "list")[1]
    assert Streams(server).run(BODIES) == calm
    assert "0  serving" in penstock(server, "restart", "0")[1]
    code, out, _ = penstock(server, "remove", "2")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["0", "1"]
    assert Streams(server).run(BODIES) == calm
    assert len(server.engine_pids()) == 2
    assert 'engine="2"' not in "".join(
        line for line in server.get("/metrics").text.splitlines() if "num_requests" in line
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["drain"], "drain takes the index of a replica"),
        (["add", "1"], "add takes no index"),
        (["restart", "9"], "there is no replica 9 here, only 0, 1"),
        (["drain", "0", "--model", "x"], "drain takes no --model"),
        (["rolling-restart", "--model", "/nowhere"], "/nowhere"),
        (["drain", "0", "--timeout-s", "-1"], "timeout_s"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(
    subject: Subject, arguments: list[str], message: str
) -> None:
    code, out, err = penstock(subject.server, *arguments)
    assert code in (1, 2)
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not out
    replicas = subject.server.get("/replicas", headers=ADMIN).json()["replicas"]
    assert [item["state"] for item in replicas] == ["serving", "serving"]


def test_only_admins_change_replicas(subject: Subject) -> None:
    server = subject.server
    assert penstock(server, "list", key="other")[0] == 1
    for path in ("", "/0/drain", "/rolling_restart", "/"):
        assert server.post(f"/replicas{path}", {}).status_code == 401
    assert server.get("/replicas").status_code == 401


@pytest.fixture(scope="module")
def changed(
    other: Path, adapter: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> list[Answer]:
    """The answers of a single engine with the other weights."""
    with start_subject(other, tmp_path_factory.mktemp("changed"), *adapter).server as server:
        return Streams(server).run(BODIES)


def test_another_version_is_rolled_through_while_requests_end_with_theirs(
    subject: Subject, calm: list[Answer], changed: list[Answer], model: Path, other: Path
) -> None:
    assert all(before != after for before, after in zip(calm, changed, strict=True))
    server = subject.server
    fingerprint = server.post("/v1/completions", GREEDY).json()["system_fingerprint"]

    async def roll(streams: Streams) -> None:
        await streams.until(lambda: streams.num_tokens > 50)
        replicas = await asyncio.to_thread(
            change, server, "/rolling_restart", model=str(other), timeout_s=0
        )
        assert [item["state"] for item in replicas] == ["serving", "serving"]

    found = Streams(server).run_during(BODIES, roll)
    for answers, before, after in zip(found, calm, changed, strict=True):
        for answer in answers:
            assert answer.error is None
            assert answer.num_ends == 1
            assert answer.choices.keys() == before.choices.keys()
            for index, choice in answer.choices.items():
                assert choice in (before.choices[index], after.choices[index])
    assert Streams(server).run(BODIES) == changed
    now = server.post("/v1/completions", GREEDY).json()["system_fingerprint"]
    assert None not in (now, fingerprint)
    assert now != fingerprint
    cards = server.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == [str(model), "a"]
    assert cards[0]["root"] == str(other)

    # And back, with a request that is held on the replica that is restarted last.
    held = {**GREEDY, "seed": seed_of(Fault.WAIT, 40), "return_token_ids": True}
    engines = server.engine_pids()
    subject.gate.close()
    with ThreadPoolExecutor() as threads:
        last = {"X-data-parallel-rank": "1"}
        waiting = threads.submit(server.post, "/v1/completions", held, headers=last)
        asyncio.run(subject.gate.reached())
        rolling = threads.submit(change, server, "/rolling_restart", model=str(model), timeout_s=0)
        eventually(lambda: len(server.engine_pids() - engines) == 1)
        subject.gate.open()
        (choice,) = waiting.result().json()["choices"]
        assert [item["state"] for item in rolling.result()] == ["serving", "serving"]
    assert choice["token_ids"] == changed[0].choices[0]["token_ids"]
    assert Streams(server).run(BODIES) == calm
    assert server.post("/v1/completions", GREEDY).json()["system_fingerprint"] == fingerprint


def test_a_model_with_another_tokenizer_is_refused(
    subject: Subject, calm: list[Answer], other: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(other, folder)
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace("<end>", "<stop>"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    answer = subject.server.post("/replicas/rolling_restart", {"model": str(folder)}, headers=ADMIN)
    assert answer.status_code == 400
    assert "another tokenizer" in answer.json()["error"]["message"]
    assert Streams(subject.server).run(BODIES) == calm


def test_without_an_admin_key_nobody_changes_replicas(model: Path, tmp_path: Path) -> None:
    with start_subject(model, tmp_path).server as server:
        answer = server.post("/replicas", {})
        assert answer.status_code == 400
        assert "--admin-api-key" in answer.json()["error"]["message"]
        assert server.get("/replicas").json()["replicas"][0]["state"] == "serving"
