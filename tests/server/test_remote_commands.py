"""`penstock chat --url` and `penstock complete` with a running server."""

from __future__ import annotations

import io
import sys

import pytest
from server_process import ServerProcess

from penstock.cli.main import main

GREEDY = ("--temperature", "0", "--max-tokens", "8")
PROMPT = "The capital of France is"


def test_a_prompt_is_completed_by_a_server(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = str(server.base_url)
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8}
    text = server.post("/v1/completions", body).json()["choices"][0]["text"] + "\n"
    assert main(["complete", "--url", url, *GREEDY, PROMPT]) == 0
    assert capsys.readouterr().out == text
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert main(["complete", "--url", f"{url}/v1/", *GREEDY]) == 0
    assert capsys.readouterr().out == text


def test_a_conversation_is_answered_by_a_server(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = str(server.base_url)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi\nyou"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 8}
    answer = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    monkeypatch.setattr(sys, "stdin", io.StringIO('"""Hi\nyou"""\n/exit\n'))
    assert main(["chat", "--url", url, "--system-prompt", "S", *GREEDY]) == 0
    captured = capsys.readouterr()
    assert captured.out == answer + "\n"
    assert "[8 tokens, " in captured.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model-name", "other"], "other"),
        (["--logit-bias", '{"999999": 1}'], "logit_bias"),
    ],
)
def test_a_servers_refusal_is_shown(
    flags: list[str],
    message: str,
    server: ServerProcess,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["complete", "--url", str(server.base_url), *flags, "a"]) == 1
    assert message in capsys.readouterr().err


def test_options_of_an_engine_are_not_for_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://localhost:1", "--block-size", "16"]) == 2
    assert "block_size is the server's matter: drop it, or drop --url" in capsys.readouterr().err
