"""Several API processes on one port: they share engines, stored responses, adapters and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import httpx
import pytest
from adapter_requests import ADMIN, LORA, load, unload
from certificates import make_certificate
from faults.saboteur import Fault, seed_of
from faults.streams import Body, Streams
from faults.subject import Subject, start_subject
from prometheus_client.parser import text_string_to_metric_families
from server_process import DUMMY, ServerProcess, is_running, name_of, refused
from tiny_adapters import write_adapters
from waiting import eventually

from penstock.config import ServerConfig
from penstock.protocol.errors import ConfigError
from penstock.server.processes.arrivals import Door
from penstock.server.processes.link import ApiLink

GREEDY: Body = {"prompt": "Once", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
SEEDED: Body = {**GREEDY, "temperature": 1.0, "seed": 11}
TWO = ("--api-server-count", "2")
COMPLETIONS = {"handler": "/v1/completions"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapters(tmp_path_factory.mktemp("roots") / "adapters")


@pytest.fixture(scope="module")
def subject(
    tiny_model: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    """Two API processes and two engines."""
    subject = start_subject(
        *(tiny_model, tmp_path_factory.mktemp("flags"), *TWO, "-dp", "2", *LORA),
        *("--admin-api-key", "admin-key", "--allowed-lora-paths", str(folder)),
        "--enable-log-requests",
    )
    with subject.server:
        yield subject


@pytest.fixture
def server(subject: Subject) -> ServerProcess:
    eventually(lambda: len(api_pids(subject.server)) == 2)
    return subject.server


def api_pids(server: ServerProcess) -> set[int]:
    return {pid for pid in server.child_pids() if name_of(pid) == "penstock-api"}


def owner_of(server: ServerProcess, client: httpx.Client) -> int:
    """The process that has the connection of a client."""
    with client.stream("GET", "/health") as response:
        assert response.read() == b""
        port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
        ends = f":{server.port:04X} [0-9A-F]+:{port:04X} "
        table = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
        # Old connections between the same ports are listed without a socket, and a connection may
        # be listed twice if others come and go meanwhile.
        lines = [line.split() for line in table.splitlines() if re.search(ends, line)]
        (socket,) = {line[9] for line in lines} - {"0"}
        (pid,) = [pid for pid in api_pids(server) if f"socket:[{socket}]" in files_of(pid)]
    return pid


def files_of(pid: int) -> list[str]:
    files = []
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            files.append(os.readlink(file))
    return files


def has_connections(pid: int, uds: Path) -> bool:
    """Whether a process has some of those to a Unix socket."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    own = {f"socket:[{line.split()[6]}]" for line in lines if line.endswith(f" {uds}")}
    return not own.isdisjoint(files_of(pid))


@contextlib.contextmanager
def clients_of(server: ServerProcess) -> Iterator[dict[int, httpx.Client]]:
    """A client of each API process, as soon as both take connections."""
    with contextlib.ExitStack() as stack:
        found: dict[int, httpx.Client] = {}

        def have_both() -> bool:
            client = stack.enter_context(server.client())
            if found.setdefault(owner_of(server, client), client) is not client:
                client.close()
            return len(found) == 2

        eventually(have_both)
        yield found


def metric(server: ServerProcess, name: str, **labels: str) -> float:
    return sum(
        sample.value
        for family in text_string_to_metric_families(server.get("/metrics").text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def test_connections_are_divided_and_counts_added_up(server: ServerProcess) -> None:
    counts: list[tuple[str, dict[str, str]]] = [
        ("penstock:generation_tokens_total", {}),
        ("http_requests_total", COMPLETIONS),
    ]
    before = [metric(server, name, **labels) for name, labels in counts]
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(server.client()) for _ in range(8)]
        texts = set()
        owners = []
        for client in clients:
            answer = client.post("/v1/completions", json=GREEDY).json()
            texts.add(answer["choices"][0]["text"])
            owners.append(owner_of(server, client))
    assert len(texts) == 1
    # A connection that was closed may still count: it takes a moment to be told.
    assert all(3 <= owners.count(pid) <= 5 for pid in api_pids(server))
    after = [metric(server, name, **labels) for name, labels in counts]
    assert after == [before[0] + 8 * 60, before[1] + 8]
    eventually(server.is_idle)


def test_all_processes_show_the_requests_of_all(subject: Subject, server: ServerProcess) -> None:
    async def look(streams: Streams) -> None:
        with clients_of(server) as clients:
            for client in clients.values():
                while client.get("/load").json()["server_load"] < 6:
                    await asyncio.sleep(0.01)
        subject.gate.open()

    subject.gate.close()
    answers = Streams(server).run([{**GREEDY, "seed": seed_of(Fault.WAIT, 3)}] * 6, look)
    assert all(answer == answers[0] and answer.num_ends == 1 for answer in answers)
    eventually(server.is_idle)


def test_a_beam_search_is_logged_and_counted_by_its_completions(server: ServerProcess) -> None:
    names = [
        "penstock:request_success_total",
        "penstock:e2e_request_latency_seconds_count",
        "penstock:time_to_first_token_seconds_count",
        "penstock:request_params_n_count",
        "penstock:request_generation_tokens_sum",
        "penstock:generation_tokens_total",
    ]
    before = [metric(server, name) for name in names]
    body = {**GREEDY, "max_tokens": 5, "n": 3, "use_beam_search": True}
    answer = server.post("/v1/completions", body, headers={"X-Request-Id": "found"})
    assert answer.json()["usage"]["completion_tokens"] == 15
    eventually(server.is_idle)
    grown = [metric(server, name) - old for name, old in zip(names, before, strict=True)]
    assert grown == [3, 3, 3, 1, 15, 1 + 4 * 3], "the tokens are those of the engine's work"
    eventually(lambda: server.has_logged("#2 ended: "))
    lines = [line for line in server.log if "Request cmpl-found" in line]
    assert len(lines) == 3
    for line in lines:
        assert "finish_reason length, " in line
        assert "num_prompt_tokens 4, num_cached_tokens 0, num_output_tokens 5, " in line


def test_stored_responses_and_adapters_are_those_of_all(
    server: ServerProcess, folder: Path
) -> None:
    with clients_of(server) as clients:
        one, other = clients.values()
        body = {"input": "Hello", "max_output_tokens": 16}
        first = one.post("/v1/responses", json=body).json()
        assert other.get(f"/v1/responses/{first['id']}").json()["output"] == first["output"]
        body["previous_response_id"] = first["id"]
        assert other.post("/v1/responses", json=body).status_code == 200
        talk = one.post("/v1/conversations", json={}).json()["id"]
        said = {"role": "user", "content": "Hello"}
        for client in (one, other):
            answer = client.post(f"/v1/conversations/{talk}/items", json={"items": [said]})
            assert answer.status_code == 200, answer.text
        assert len(one.get(f"/v1/conversations/{talk}/items").json()["data"]) == 2
        assert other.delete(f"/v1/responses/{first['id']}").status_code == 200
        assert one.get(f"/v1/responses/{first['id']}").status_code == 404

        assert load(server, "a", folder / "a").status_code == 200
        asked = {**GREEDY, "model": "a"}
        texts = [c.post("/v1/completions", json=asked).json() for c in (one, other)]
        assert texts[0]["choices"] == texts[1]["choices"]
        assert load(server, "a", folder / "a").status_code == 400
        assert unload(server, "a").status_code == 200
        for client in (one, other):
            assert client.post("/v1/completions", json=asked).status_code == 404
        missing = load(server, "b", folder / "nothing")
        assert missing.status_code == 404
        assert missing.json()["error"]["param"] == "lora_path"


def test_a_background_response_is_cancelled_from_any_process(
    subject: Subject, server: ServerProcess
) -> None:
    subject.gate.close()
    with clients_of(server) as clients:
        one, other = clients.values()
        body = {"input": "Hello", "background": True, "seed": seed_of(Fault.WAIT, 3)}
        started = one.post("/v1/responses", json=body).json()
        assert started["status"] == "queued"
        cancelled = other.post(f"/v1/responses/{started['id']}/cancel").json()
        assert cancelled["status"] == "cancelled"
    subject.gate.open()
    eventually(server.is_idle)


def test_a_process_that_dies_loses_only_its_connections(
    subject: Subject, server: ServerProcess
) -> None:
    calm = Streams(server).run([SEEDED] * 3)
    held = {**SEEDED, "seed": seed_of(Fault.WAIT, 3), "stream": True}
    subject.gate.close()
    with clients_of(server) as clients:
        (victim, doomed), (survivor, other) = clients.items()
        with (
            doomed.stream("POST", "/v1/completions", json=held) as lost,
            other.stream("POST", "/v1/completions", json=held) as kept,
        ):
            os.kill(victim, signal.SIGKILL)
            with pytest.raises(httpx.HTTPError):
                lost.read()
            eventually(lambda: server.get("/load").json()["server_load"] == 1)
            subject.gate.open()
            assert kept.read().endswith(b"data: [DONE]\n\n")
    eventually(lambda: len(api_pids(server)) == 2)
    assert survivor in api_pids(server)
    assert metric(server, "penstock:api_process_restarts_total") == 1
    assert Streams(server).run([SEEDED] * 3) == calm
    with clients_of(server):
        pass  # the new one takes connections
    eventually(server.is_idle)


def test_engines_may_die_and_replicas_change(server: ServerProcess) -> None:
    calm = Streams(server).run([SEEDED] * 4)

    async def kill(streams: Streams) -> None:
        await streams.until(lambda: streams.num_tokens > 30)
        os.kill(min(server.engine_pids()), signal.SIGKILL)

    assert Streams(server).run([SEEDED] * 4, kill) == calm
    eventually(lambda: {i["state"] for i in server.get("/load").json()["replicas"]} == {"serving"})
    with clients_of(server) as clients:
        one, other = clients.values()
        answer = one.post("/replicas/1/drain", json={"timeout_s": 0}, headers=ADMIN)
        assert answer.json()["replicas"][1]["state"] == "draining"
        eventually(lambda: other.get("/load").json()["replicas"][1]["state"] == "draining")
        assert one.post("/replicas/0/drain", json={}, headers=ADMIN).status_code == 400
        named = {"X-data-parallel-rank": "2"}
        refused = other.post("/v1/completions", json=GREEDY, headers=named)
        assert "only 0, 1" in refused.json()["error"]["message"]


@pytest.mark.slow
def test_another_version_is_shown_by_all_processes(
    server: ServerProcess, tiny_model: Path, tmp_path: Path
) -> None:
    version = tmp_path / "version"
    version.mkdir()
    for file in tiny_model.iterdir():
        (version / file.name).write_bytes(file.read_bytes())
    config = (version / "config.json").read_text()
    (version / "config.json").write_text(
        config.replace('"rope_theta": 10000.0', '"rope_theta": 5e3')
    )

    async def roll(streams: Streams) -> None:
        body = {"model": str(version), "timeout_s": 0}
        answer = await asyncio.to_thread(
            server.post, "/replicas/rolling_restart", body, headers=ADMIN
        )
        assert answer.status_code == 200, answer.text

    for answers in Streams(server).run_during([SEEDED] * 4, roll):
        assert all(answer.error is None and answer.num_ends == 1 for answer in answers)
    with clients_of(server) as clients:
        prints = {
            client.post("/v1/completions", json=GREEDY).json()["system_fingerprint"]
            for client in clients.values()
        }
    assert len(prints) == 1
    assert None not in prints


def test_on_a_unix_socket_with_tls_a_signal_lets_the_requests_of_all_processes_finish(
    tiny_model: Path, tmp_path: Path
) -> None:
    key, certificate = make_certificate(tmp_path)
    subject = start_subject(
        *(tiny_model, tmp_path, *TWO, "--load-format", "dummy"),
        *("--ssl-keyfile", str(key), "--ssl-certfile", str(certificate)),
        uds=tmp_path / "api",
        tls_ca=certificate,
    )
    with subject.server as server:
        pids = server.child_pids()

        async def stop(streams: Streams) -> None:
            while server.get("/load").json()["server_load"] < 4:
                await asyncio.sleep(0.01)
            assert all(has_connections(pid, tmp_path / "api") for pid in api_pids(server))
            server.process.send_signal(signal.SIGTERM)
            while not server.has_logged("4 requests have 25 s to finish"):
                await asyncio.sleep(0.01)
            subject.gate.open()

        subject.gate.close()
        answers = Streams(server).run([{**GREEDY, "seed": seed_of(Fault.WAIT, 3)}] * 4, stop)
        assert all(answer.num_ends == 1 and answer.error is None for answer in answers)
        assert server.wait() == 0
        eventually(lambda: not any(map(is_running, pids)))


def test_a_door_closes_with_the_other_end() -> None:
    async def run() -> list[str]:
        closed: list[str] = []
        ours, theirs = socket.socketpair()
        door = Door(ours, cast(ApiLink, SimpleNamespace(num_handed=0)), lambda: closed.append("it"))
        with theirs, socket.socket() as connection:
            assert door.pass_on(connection)
        while door.is_open:
            await asyncio.sleep(0)
        door.close()
        return closed

    assert asyncio.run(run()) == ["it"]


@pytest.mark.parametrize("count", [0, -1, 65])
def test_a_count_that_makes_no_sense_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=f"api_server_count must be from 1 to 64, got {count}"):
        ServerConfig(api_server_count=count)


def test_what_no_process_can_load_is_refused_in_one_line(tiny_model: Path) -> None:
    template = ("--chat-template", "/nowhere.jinja")
    ended = refused(str(tiny_model), "--port", "0", *DUMMY, *TWO, *template)
    assert ended.returncode == 2, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if "error:" in line]
    assert "/nowhere.jinja" in line


def test_a_port_in_use_is_refused_in_one_line(server: ServerProcess, tiny_model: Path) -> None:
    where = ("--host", "127.0.0.1", "--port", str(server.port))
    ended = refused(str(tiny_model), *where, *DUMMY, *TWO)
    assert ended.returncode == 2, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert f"cannot listen on 127.0.0.1:{server.port}" in line
