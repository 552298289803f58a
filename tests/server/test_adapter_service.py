"""LoRA adapters over HTTP: chosen by name in every API, loaded and unloaded while serving."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapter_requests import ADMIN, APIS, CHAT, GREEDY, LORA, error_of, load, names, say, unload
from prometheus_client.parser import text_string_to_metric_families
from server_process import SMALL, ServerProcess, environment
from tiny_adapters import broken_adapters, write_adapter, write_adapters
from waiting import eventually

PATIENT = ("--engine-heartbeat-timeout-s", "600")  # with engines that are stopped


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters that may be loaded: a, b and c, and what only looks like some."""
    root = write_adapters(tmp_path_factory.mktemp("roots") / "adapters")
    write_adapter(root / "on-demand" / "d", 3)
    write_adapter(root.parent / "outside", 4)
    (root / "link").symlink_to(root.parent / "outside")
    return root


@pytest.fixture(scope="module")
def server(tiny_model: Path, folder: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(
        *(str(tiny_model), *SMALL, *LORA, *PATIENT, "--served-model-name", "tiny"),
        *("--admin-api-key", "admin-key", "--allowed-lora-paths", str(folder)),
        *("--lora-resolver", str(folder / "on-demand")),
        *("--lora-modules", f"a={folder / 'a'}"),
        json.dumps({"name": "b", "path": str(folder / "b"), "base_model_name": "tiny"}),
    )
    yield process
    process.close()


# -- names


def test_adapters_are_listed_with_their_parent_and_root(
    server: ServerProcess, folder: Path
) -> None:
    cards = {card["id"]: card for card in server.get("/v1/models").json()["data"]}
    assert cards["tiny"]["parent"] is None
    for name in "ab":
        assert cards[name]["parent"] == "tiny"
        assert cards[name]["root"] == str(folder / name)
        assert server.get(f"/v1/models/{name}").json() == cards[name]
    error_of(server.get("/v1/models/nothing"), 404)


def test_base_and_adapters_say_different_things_each_its_own(server: ServerProcess) -> None:
    said = {model: say(server, model) for model in ("tiny", "a", "b")}
    assert len(set(said.values())) == 3
    with ThreadPoolExecutor(9) as threads:
        asked = ["tiny", "a", "b"] * 3
        together = list(threads.map(lambda model: say(server, model), asked))
    assert together == [said[model] for model in asked]


@pytest.mark.parametrize("path", APIS)
def test_the_models_name_chooses_the_adapter_in_every_api(server: ServerProcess, path: str) -> None:
    body, text_of = APIS[path]
    said = {}
    for model in ("tiny", "a", "b"):
        reply = server.post(path, {**body, "model": model}).json()
        assert reply["model"] == model
        said[model] = text_of(reply)
    assert len(set(said.values())) == 3
    assert server.post(path, {**body, "model": "nothing"}).status_code == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "Hello"}),
        ("/detokenize", {"tokens": [1, 2]}),
        ("/v1/messages/count_tokens", {"messages": CHAT["messages"]}),
        ("/v1/responses/input_tokens", {"input": "Hello"}),
    ],
)
def test_an_adapter_has_the_tokens_of_its_base(
    server: ServerProcess, path: str, body: dict[str, Any]
) -> None:
    replies = [server.post(path, {**body, "model": model}) for model in ("tiny", "a")]
    assert replies[0].json() == replies[1].json()
    assert server.post(path, {**body, "model": "nothing"}).status_code == 404


def test_a_stream_names_the_adapter_in_every_chunk(server: ServerProcess) -> None:
    body = {"model": "a", "prompt": "Hello", "stream": True, **GREEDY}
    lines = server.post("/v1/completions", body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert {chunk["model"] for chunk in chunks} == {"a"}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == say(server, "a")


def test_prefixes_of_one_adapter_are_not_used_for_another(server: ServerProcess) -> None:
    prompt = "the same long prefix " * 4
    alone = {model: say(server, model, prompt) for model in ("a", "b", "tiny")}
    again = {model: say(server, model, prompt) for model in ("tiny", "b", "a")}
    assert alone == again
    assert len(set(alone.values())) == 3


def test_a_response_in_the_background_runs_with_its_adapter(server: ServerProcess) -> None:
    body, text_of = APIS["/v1/responses"]
    body = {**body, "model": "a"}
    begun = server.post("/v1/responses", {**body, "background": True}).json()
    found: dict[str, Any] = {}

    def is_done() -> bool:
        found.update(server.get(f"/v1/responses/{begun['id']}").json())
        return found["status"] not in ("queued", "in_progress")

    eventually(is_done)
    assert found["model"] == "a"
    assert text_of(found) == text_of(server.post("/v1/responses", body).json())


# -- loading and unloading


def test_an_adapter_comes_and_goes(server: ServerProcess, folder: Path) -> None:
    answer = load(server, "c", folder / "c")
    assert (answer.status_code, answer.text) == (
        200, "Success: LoRA adapter 'c' added successfully.",
    )  # fmt: skip
    assert "c" in names(server)
    assert say(server, "c") != say(server, "tiny")
    message, param = error_of(load(server, "c", folder / "c"))
    assert (param, "load_inplace" in message) == ("lora_name", True)
    answer = unload(server, "c", lora_int_id=3)
    assert (answer.status_code, answer.text) == (
        200, "Success: LoRA adapter 'c' removed successfully.",
    )  # fmt: skip
    assert "c" not in names(server)
    body = {"model": "c", "prompt": "x"}
    message, param = error_of(server.post("/v1/completions", body), 404)
    assert (message, param) == ("there is no model 'c' here; there is tiny, a, b", "model")
    assert error_of(unload(server, "c"), 404)[1] == "lora_name"


def test_other_weights_under_a_name_are_never_served_from_the_cache_of_the_old(
    server: ServerProcess, folder: Path, tmp_path: Path
) -> None:
    prompt = "a prefix that is long enough for the cache " * 3
    before = [say(server, name, prompt) for name in "ab"]
    assert before[0] != before[1]
    place = folder / "changing"
    shutil.copytree(folder / "a", place)
    try:
        assert load(server, "changing", place).status_code == 200
        assert say(server, "changing", prompt) == before[0]
        shutil.copytree(folder / "b", place, dirs_exist_ok=True)
        assert load(server, "changing", place, load_inplace=True).status_code == 200
        assert say(server, "changing", prompt) == before[1]
        assert unload(server, "changing").status_code == 200
    finally:
        shutil.rmtree(place)


def test_requests_keep_their_version_and_unloading_waits_for_them(
    server: ServerProcess, folder: Path
) -> None:
    assert load(server, "x", folder / "a").status_code == 200
    long = {"max_tokens": 60}
    expected = say(server, "a", **long)
    with ThreadPoolExecutor(2) as threads:
        with server.engine_stopped():
            running = threads.submit(say, server, "x", **long)
            eventually(lambda: server.get("/load").json()["server_load"] == 1)
            unloading = threads.submit(unload, server, "x")
            eventually(lambda: "x" not in names(server))
            assert not unloading.done()
        assert running.result() == expected
        assert unloading.result().status_code == 200


def test_unloading_ends_requests_if_that_is_asked_for(server: ServerProcess, folder: Path) -> None:
    assert load(server, "x", folder / "a").status_code == 200
    body = {"model": "x", "prompt": "Hello", **GREEDY, "max_tokens": 60}
    with ThreadPoolExecutor(3) as threads:
        with server.engine_stopped():
            mine = threads.submit(server.post, "/v1/completions", body)
            other = threads.submit(server.post, "/v1/completions", {**body, "model": "a"})
            eventually(lambda: server.get("/load").json()["server_load"] == 2)
            unloading = threads.submit(unload, server, "x", abort_requests=True)
            message, _ = error_of(mine.result(), 404)
            assert message == "the adapter 'x' was unloaded while the request ran"
        assert other.result().status_code == 200
        assert unloading.result().status_code == 200


def test_a_broken_adapter_is_refused_with_the_reason_and_harms_nobody(
    server: ServerProcess, folder: Path
) -> None:
    said = say(server, "a")
    for name, (spoil, reason) in broken_adapters(folder.parent / "outside").items():
        path = folder / f"broken-{name}"
        shutil.copytree(folder / "a", path)
        try:
            spoil(path)
            message, param = error_of(load(server, "bad", path))
            assert param == "lora_path"
            assert reason in message, message
        finally:
            shutil.rmtree(path)
    message, param = error_of(load(server, "bad", folder / "nowhere"), 404)
    assert param == "lora_path"
    assert "bad" not in names(server)
    assert say(server, "a") == said


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_name": "tiny"}, "lora_name"),
        ({"lora_name": ""}, "lora_name"),
        ({"lora_name": "n" * 100_000}, "lora_name"),
        ({"lora_name": None}, "lora_name"),
        ({"lora_path": "/etc"}, "lora_path"),
        ({"lora_path": "{folder}/../outside"}, "lora_path"),
        ({"lora_path": "{folder}/link"}, "lora_path"),
        ({"lora_path": "some-org/adapter"}, "lora_path"),
        ({"lora_path": "pypi:some==1"}, "lora_path"),
        ({"lora_path": "p" * 100_000}, "lora_path"),
        ({"lora_path": "\0"}, "lora_path"),
        ({"base_model_name": "other"}, "base_model_name"),
        ({"load_inplace": "perhaps"}, "load_inplace"),
    ],
)
def test_loads_that_are_not_allowed_are_refused_with_the_field(
    server: ServerProcess, folder: Path, body: dict[str, Any], param: str
) -> None:
    body = {"lora_name": "x", "lora_path": str(folder / "c"), **body}
    body = {k: v.format(folder=folder) if isinstance(v, str) else v for k, v in body.items()}
    response = server.post("/v1/load_lora_adapter", body, headers=ADMIN)
    message, found = error_of(response)
    assert found == param
    assert len(message) < 2000
    assert names(server) == ["tiny", "a", "b"]


def test_the_routes_need_the_admin_key(server: ServerProcess, folder: Path) -> None:
    body = {"lora_name": "x", "lora_path": str(folder / "c")}
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/load_lora_adapter/"):
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert server.post(path, body, headers=headers).status_code == 401


def test_a_client_that_leaves_during_a_load_leaves_nothing(
    server: ServerProcess, folder: Path
) -> None:
    body = {"lora_name": "x", "lora_path": str(folder / "c"), "pinned": True}
    patience = httpx.Timeout(240, read=1.0)
    with server.engine_stopped():
        with server.client() as client, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/load_lora_adapter", json=body, headers=ADMIN, timeout=patience)
        error_of(unload(server, "x"), 404)  # it comes after the load, which has been given up
    for _ in range(2):  # its pin and its name are free
        assert load(server, "x", folder / "c", pinned=True).status_code == 200
        assert unload(server, "x").status_code == 200


def test_loads_and_unloads_of_one_name_at_once_leave_it_loaded_or_not(
    server: ServerProcess, folder: Path
) -> None:
    with ThreadPoolExecutor(8) as threads:
        works = [lambda: load(server, "x", folder / "c"), lambda: unload(server, "x")] * 8
        statuses = [r.status_code for r in threads.map(lambda work: work(), works)]
    loads, unloads = statuses[::2].count(200), statuses[1::2].count(200)
    assert set(statuses[::2]) <= {200, 400}
    assert set(statuses[1::2]) <= {200, 404}
    assert loads - unloads == ("x" in names(server))
    if "x" in names(server):
        assert unload(server, "x").status_code == 200


def test_names_in_the_resolvers_folder_are_loaded_when_asked_for(
    server: ServerProcess, folder: Path
) -> None:
    assert "d" not in names(server)
    with ThreadPoolExecutor(4) as threads:
        said = set(threads.map(lambda _: say(server, "d"), range(4)))
    assert len(said) == 1
    assert say(server, "tiny") not in said
    assert names(server).count("d") == 1
    for name in ("../a", "../../outside", "d/..", "/etc", "e", "d\0", "n" * 10_000):
        body = {"model": name, "prompt": "x"}
        message, param = error_of(server.post("/v1/completions", body), 404)
        assert param == "model"
        assert len(message) < 500
    assert unload(server, "d").status_code == 200


def test_more_adapters_than_fit_take_turns(server: ServerProcess, folder: Path) -> None:
    many = [f"many-{number}" for number in range(6)]
    places = [write_adapter(folder / name, 100 + number) for number, name in enumerate(many)]
    try:
        for name, place in zip(many, places, strict=True):
            assert load(server, name, place).status_code == 200
        alone = {name: say(server, name) for name in many}
        assert len(set(alone.values())) > 1
        asked = many * 4
        with ThreadPoolExecutor(len(asked)) as threads:
            together = list(threads.map(lambda name: say(server, name), asked))
        assert together == [alone[name] for name in asked]
        for name in many:
            assert unload(server, name).status_code == 200
    finally:
        for place in places:
            shutil.rmtree(place)


def test_metrics_tell_of_adapters(server: ServerProcess) -> None:
    def samples() -> dict[str, Any]:
        families = text_string_to_metric_families(server.get("/metrics").text)
        return {
            sample.name.removeprefix("penstock:"): sample for f in families for sample in f.samples
        }

    body = {"model": "a", "prompt": "Hello", **GREEDY, "max_tokens": 200, "stream": True}
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as stream:
        next(stream.iter_lines())

        def shown() -> dict[str, str]:
            sample = samples().get("lora_requests_info")
            return {} if sample is None else sample.labels

        eventually(lambda: shown().get("running_lora_adapters") in ("a", ""))
        assert shown()["max_lora"] == "3"
    eventually(lambda: samples()["lora_loads_total"].value >= 2)
    eventually(lambda: samples()["lora_placements_total"].value >= 1)
    eventually(lambda: samples()["lora_host_adapters"].value >= 1)


# -- crashes


def test_adapters_survive_the_engine(server: ServerProcess, folder: Path) -> None:
    assert load(server, "pinned", folder / "c", pinned=True).status_code == 200
    before = {name: say(server, name, max_tokens=100) for name in ("tiny", "a", "pinned")}
    with ThreadPoolExecutor(3) as threads:
        with server.engine_stopped():
            running = {name: threads.submit(say, server, name, max_tokens=100) for name in before}
            eventually(lambda: server.get("/load").json()["server_load"] == 3)
            os.kill(server.engine_pid, signal.SIGKILL)
        assert {name: task.result() for name, task in running.items()} == before
    assert names(server) == ["tiny", "a", "b", "pinned"]
    assert unload(server, "pinned").status_code == 200


def test_pinned_adapters_are_pinned_again_after_a_crash(
    server: ServerProcess, folder: Path
) -> None:
    places = {name: write_adapter(folder / name, 200 + ord(name)) for name in "pqr"}
    try:
        for name in "pq":  # as many as three slots allow
            assert load(server, name, places[name], pinned=True).status_code == 200
        os.kill(server.engine_pid, signal.SIGKILL)
        answers = []

        def is_refused() -> bool:
            answers.append(load(server, "r", places["r"], pinned=True))
            return answers[-1].status_code == 400

        eventually(is_refused)
        assert {answer.status_code for answer in answers} <= {400, 503}
        message, param = error_of(answers[-1])
        assert param == "lora_name"
        assert "(pinned: q, p)" in message  # the most recent first
        for name in "pq":
            assert unload(server, name).status_code == 200
        assert load(server, "r", places["r"], pinned=True).status_code == 200
        assert unload(server, "r").status_code == 200
    finally:
        for place in places.values():
            shutil.rmtree(place)


def test_a_load_while_the_engine_restarts_is_a_503_or_a_success(
    server: ServerProcess, folder: Path
) -> None:
    os.kill(server.engine_pid, signal.SIGKILL)
    answers = []

    def try_again() -> bool:
        answers.append(load(server, "x", folder / "c").status_code)
        return answers[-1] == 200

    eventually(try_again)
    assert set(answers) <= {200, 503}
    assert unload(server, "x").status_code == 200
    assert server.get("/health").status_code == 200


# -- other ways in


def test_lines_of_a_batch_file_choose_adapters(
    server: ServerProcess, tiny_model: Path, folder: Path, tmp_path: Path
) -> None:
    body = {"prompt": "Hello", **GREEDY}
    lines = [
        {
            "custom_id": model,
            "method": "POST",
            "url": "/v1/completions",
            "body": {**body, "model": model},
        }
        for model in ("tiny", "a", "on-demand/d")
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = [sys.executable, "-m", "penstock", "run-batch", str(tiny_model), *SMALL[:4], *LORA]
    command += ["--served-model-name", "tiny", "--lora-modules", f"a={folder / 'a'}"]
    (tmp_path / "config.yaml").write_text(json.dumps({"lora-resolver": [str(folder)]}))
    command += ["--config", str(tmp_path / "config.yaml")]
    command += ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    subprocess.run(command, check=True, capture_output=True, env=environment({}))
    results = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    said = {line["custom_id"]: line["response"]["body"] for line in results}
    assert {name: reply["model"] for name, reply in said.items()} == {name: name for name in said}
    texts = {name: reply["choices"][0]["text"] for name, reply in said.items()}
    wanted = {"tiny": "tiny", "a": "a", "on-demand/d": "d"}
    assert texts == {name: say(server, own) for name, own in wanted.items()}
    assert unload(server, "d").status_code == 200
