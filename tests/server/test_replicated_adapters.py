"""LoRA adapters on several replicas: a load reaches all of them, and those that start later."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from adapter_requests import ADMIN, GREEDY, LORA, load, unload
from faults.streams import Body, Streams
from prometheus_client.parser import text_string_to_metric_families
from server_process import SMALL, ServerProcess
from tiny_adapters import write_adapters
from waiting import eventually


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapters(tmp_path_factory.mktemp("roots") / "adapters")


@pytest.fixture(scope="module")
def server(tiny_model: Path, folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(
        *(str(tiny_model), *SMALL, *LORA, "-dp", "2", "--served-model-name", "tiny"),
        *("--admin-api-key", "admin-key", "--allowed-lora-paths", str(folder)),
        *("--lora-modules", f"a={folder / 'a'}"),
    ) as process:
        yield process


def texts(server: ServerProcess, model: str) -> set[str]:
    """What each replica says with this adapter."""
    found = set()
    for replica in server.get("/load").json()["replicas"]:
        response = server.post(
            "/v1/completions",
            {"model": model, "prompt": "Hello", **GREEDY},
            headers={"X-data-parallel-rank": str(replica["engine"])},
        )
        assert response.status_code == 200, response.text
        found.add(response.json()["choices"][0]["text"])
    return found


def loaded(server: ServerProcess) -> dict[str, float]:
    """How often each engine has loaded adapters."""
    return {
        sample.labels["engine"]: sample.value
        for family in text_string_to_metric_families(server.get("/metrics").text)
        for sample in family.samples
        if sample.name == "penstock:lora_loads_total"
    }


def test_a_load_reaches_all_replicas_and_those_that_start_later(
    server: ServerProcess, folder: Path
) -> None:
    (base,) = texts(server, "tiny")
    (first,) = texts(server, "a")
    assert load(server, "b", folder / "b", pinned=True).status_code == 200
    (second,) = texts(server, "b")
    assert len({base, first, second}) == 3
    eventually(lambda: loaded(server) == {"0": 2, "1": 2})
    assert server.post("/replicas", {}, headers=ADMIN).status_code == 200
    eventually(lambda: loaded(server)["2"] == 2)
    assert texts(server, "a") == {first}
    assert texts(server, "b") == {second}
    before = sum(loaded(server).values())
    os.kill(min(server.engine_pids()), signal.SIGKILL)
    eventually(lambda: sum(loaded(server).values()) == before + 2)
    assert texts(server, "b") == {second}
    assert unload(server, "b").status_code == 200
    assert server.post("/replicas/2/remove", {}, headers=ADMIN).status_code == 200
    assert texts(server, "a") == {first}


def test_a_set_of_adapters_is_replaced_under_load(server: ServerProcess, folder: Path) -> None:
    sets = [{"x": "a", "y": "b"}, {"x": "b", "y": "c"}]
    bodies: list[Body] = [
        {"model": name, "prompt": "Hello", **GREEDY, "max_tokens": 40} for name in sets[0]
    ] * 3
    for name, path in sets[0].items():
        assert load(server, name, folder / path).status_code == 200
    old = Streams(server).run(bodies)

    async def replace(streams: Streams) -> None:
        await streams.until(lambda: streams.num_tokens > 50)
        for name, path in sets[1].items():
            options = {"load_inplace": True}
            answer = await asyncio.to_thread(load, server, name, folder / path, **options)
            assert answer.status_code == 200, answer.text

    found = Streams(server).run_during(bodies, replace)
    new = Streams(server).run(bodies)
    for answers, before, after in zip(found, old, new, strict=True):
        assert before != after
        num_before = answers.count(before)
        assert answers == [before] * num_before + [after] * (len(answers) - num_before)
    for name in sets[0]:
        assert unload(server, name).status_code == 200
