"""Options that change what the server's app is made of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from server_process import ServerProcess
from waiting import eventually

from penstock.protocol.errors import ConfigError
from penstock.server.http.plugged import add_middleware


def test_middleware_is_a_class_or_a_function() -> None:
    app = FastAPI()

    @app.get("/a")
    async def answer() -> str:
        return "A"

    add_middleware(app, "middleware_samples:Renaming")
    add_middleware(app, "middleware_samples.marking")
    response = TestClient(app).get("/b")
    assert (response.json(), response.headers["X-Marked"]) == ("A", "yes")


@pytest.mark.parametrize(
    "spec", ["no.such:Class", "os:sep", "nothing", "middleware_samples:Missing"]
)
def test_what_is_no_middleware_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="middleware must"):
        add_middleware(FastAPI(), spec)


def test_a_server_is_made_as_its_options_say(
    serve_tiny: Callable[..., ServerProcess],
) -> None:
    server = serve_tiny(
        *("--disable-fastapi-docs", "--response-role", "model", "--uvicorn-log-level", "info"),
        *("--middleware", "middleware_samples:marking", "--chat-template-content-format", "openai"),
        env={"PYTHONPATH": __file__.rpartition("/")[0]},
    )
    eventually(lambda: server.has_logged("uvicorn.error: Started server process"))
    assert server.get("/docs").status_code == server.get("/openapi.json").status_code == 404
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    answer = server.post("/v1/chat/completions", body)
    assert answer.headers["X-Marked"] == "yes"
    assert answer.json()["choices"][0]["message"]["role"] == "model"
    rendered = server.post("/tokenize", {**body, "return_token_strs": True}).json()["token_strs"]
    assert "'type':" in "".join(rendered).replace("\u0120", " ")
