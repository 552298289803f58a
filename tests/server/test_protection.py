"""Keys, limits, CORS, TLS."""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from certificates import make_certificate
from server_process import DUMMY, ServerProcess
from waiting import eventually

KEYS = ("first-key", "second-key")
LONG = {"prompt": "x", "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def guarded(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with everything on: TLS, keys, and small limits."""
    key, certificate = make_certificate(tmp_path_factory.mktemp("tls"))
    with ServerProcess(
        str(tiny_model),
        *DUMMY,
        *("--ssl-keyfile", str(key), "--ssl-certfile", str(certificate)),
        *(flag for value in KEYS for flag in ("--api-key", value)),
        *("--max-num-seqs", "1", "--max-queued-requests", "1"),
        *("--max-request-body-bytes", "10k", "--max-n", "4", "--max-prompts", "2"),
        *("--allowed-origins", '["https://page.example"]'),
        *("--served-model-name", "tiny", "--served-model-name", "small"),
        tls_ca=certificate,
    ) as process:
        yield process


@pytest.fixture
def client(guarded: ServerProcess) -> Iterator[httpx.Client]:
    with guarded.client(headers={"Authorization": f"Bearer {KEYS[0]}"}) as client:
        yield client


@pytest.mark.parametrize(
    "path", ["/v1/models", "/openapi.json", "/version", "/load", "/redoc", "/x"]
)
@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer wrong", "Bearer first-ke", "Basic first-key", "é"]
)
def test_without_a_key_there_is_no_way_in(
    guarded: ServerProcess, path: str, authorization: str | None
) -> None:
    headers = {} if authorization is None else {"Authorization": authorization.encode("latin-1")}
    response = guarded.get(path, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "AuthenticationError"
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(guarded: ServerProcess, key: str) -> None:
    response = guarded.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
    assert [card["id"] for card in response.json()["data"]] == ["tiny", "small"]


def test_health_needs_no_key(guarded: ServerProcess) -> None:
    assert guarded.get("/health").status_code == 200
    assert guarded.get("/ping").status_code == 200


def test_the_official_client_speaks_tls_with_a_key(guarded: ServerProcess) -> None:
    context = ssl.create_default_context(cafile=str(guarded.tls_ca))
    with openai.OpenAI(
        base_url=f"{guarded.base_url}/v1",
        api_key=KEYS[1],
        http_client=httpx.Client(verify=context),
    ) as client:
        answer = client.completions.create(model="small", prompt="x", max_tokens=2)
    assert answer.model == "small"


def test_a_body_that_is_too_large_is_a_413(client: httpx.Client) -> None:
    body = json.dumps({"prompt": "x" * 20_000}).encode()
    headers = {"Content-Type": "application/json"}
    whole = client.post("/v1/completions", content=body, headers=headers)
    in_parts = client.post("/v1/completions", content=iter([body]), headers=headers)
    for response in (whole, in_parts):
        assert response.status_code == 413
        assert "10240 bytes" in response.json()["error"]["message"]


@contextlib.contextmanager
def held(guarded: ServerProcess, client: httpx.Client, num_completions: int) -> Iterator[None]:
    """So many completions are under way meanwhile."""
    with ThreadPoolExecutor(1) as threads:
        with guarded.engine_stopped():
            body = {**LONG, "n": num_completions}
            running = threads.submit(client.post, "/v1/completions", json=body)
            eventually(lambda: client.get("/load").json()["server_load"] == num_completions)
            yield
        assert running.result().status_code == 200


def test_a_full_queue_is_a_429(guarded: ServerProcess, client: httpx.Client) -> None:
    with held(guarded, client, 2):
        for stream in (False, True):
            response = client.post("/v1/completions", json={**LONG, "stream": stream})
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["type"] == "RateLimitError"


@pytest.mark.parametrize(
    ("fields", "param"), [({"n": 4}, "n"), ({"prompt": ["a", "b"], "n": 2}, "prompt")]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_the_whole_queue_could_not_hold_is_a_400(
    client: httpx.Client, fields: dict[str, Any], param: str, stream: bool
) -> None:
    eventually(lambda: client.get("/load").json()["server_load"] == 0)
    response = client.post("/v1/completions", json={"prompt": "x", "stream": stream, **fields})
    assert response.status_code == 400  # not a 429: no later attempt would do better
    error = response.json()["error"]
    assert error["param"] == param
    assert "at most 2 here" in error["message"]
    assert "--max-queued-requests" in error["message"]
    assert "got 4" in error["message"]


def test_a_request_counts_as_many_completions_as_it_asks_for(
    guarded: ServerProcess, client: httpx.Client
) -> None:
    with held(guarded, client, 1):
        both = client.post("/v1/completions", json={"prompt": ["a", "b"]})
        assert both.status_code == 429
        assert "2 more would exceed the 2" in both.json()["error"]["message"]
    eventually(lambda: client.get("/load").json()["server_load"] == 0)
    assert client.post("/v1/completions", json={"prompt": ["a", "b"]}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"), [({"n": 5}, "n"), ({"prompt": ["a", "b", "c"]}, "prompt")]
)
def test_limits_are_the_servers(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    response = client.post("/v1/completions", json={"prompt": "x", **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_pages_of_allowed_origins_may_ask(client: httpx.Client, guarded: ServerProcess) -> None:
    origin = {"Origin": "https://page.example"}
    asked = {"Access-Control-Request-Method": "POST"}
    with guarded.client() as stranger:  # a browser asks beforehand, without a key
        preflight = stranger.options("/v1/completions", headers={**origin, **asked})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://page.example"
    response = client.get("/v1/models", headers=origin)
    assert response.headers["access-control-allow-origin"] == "https://page.example"
    other = client.get("/v1/models", headers={"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers


def test_without_allowed_origins_keys_close_the_api_to_web_pages(
    tiny_model: Path,
) -> None:
    headers = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    for flags, is_open in ((("--api-key", "key"), False), ((), True)):
        server = ServerProcess(str(tiny_model), *DUMMY, *flags)
        try:
            with server.client(headers={"Authorization": "Bearer key"}) as client:
                preflight = client.options("/v1/completions", headers=headers)
                answer = client.get("/v1/models", headers=headers)
        finally:
            server.close()
        assert preflight.status_code == (200 if is_open else 400)
        assert answer.status_code == 200
        for response in (preflight, answer):
            assert ("access-control-allow-origin" in response.headers) == is_open


def test_pages_of_other_origins_are_told_so_in_the_shape_of_all_errors(
    guarded: ServerProcess,
) -> None:
    headers = {"Origin": "https://other.example", "Access-Control-Request-Method": "POST"}
    with guarded.client() as stranger:
        preflight = stranger.options("/v1/completions", headers=headers)
    assert preflight.status_code == 400
    assert preflight.headers["content-type"] == "application/json"
    assert "access-control-allow-origin" not in preflight.headers
    error = preflight.json()["error"]
    assert (error["code"], error["type"]) == (400, "BadRequestError")
    assert error["message"].startswith("Disallowed CORS origin: ")
    assert "--allowed-origins" in error["message"]
