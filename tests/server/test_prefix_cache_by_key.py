"""Whose cached prefixes a request may use: those of its own API key."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import DUMMY, ServerProcess
from waiting import eventually

from penstock.config.api_keys import parse_api_keys
from penstock.server.http.access import KeyRing

KEYS = ("key-of-anna", "key-of-bert")
PROMPT = "a secret that only one of them has sent; " * 3  # in tokens as long as in bytes


@pytest.fixture(scope="module")
def two_keys(tiny_model: Path) -> Iterator[ServerProcess]:
    flags = [flag for key in KEYS for flag in ("--api-key", key)]
    with ServerProcess(str(tiny_model), *DUMMY, *flags) as process:
        yield process


def ask(server: ServerProcess, key: str, path: str, prompt: str, **fields: Any) -> int:
    """How many of the prompt's tokens came from the cache."""
    messages = [{"role": "user", "content": prompt}]
    body: dict[str, Any] = {
        "/v1/completions": {"prompt": prompt, "max_tokens": 2},
        "/v1/chat/completions": {"messages": messages, "max_tokens": 2},
        "/v1/messages": {"messages": messages, "max_tokens": 2, "model": "tiny"},
        "/v1/responses": {"input": prompt, "max_output_tokens": 2},
    }[path]
    if path == "/v1/messages":
        body["model"] = server.get("/v1/models", headers=bearer(key)).json()["data"][0]["id"]
    answer = server.post(path, {**body, **fields}, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    if path == "/v1/messages":
        return int(usage["cache_read_input_tokens"] or 0)
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"]
)
def test_a_key_does_not_see_what_another_has_sent(two_keys: ServerProcess, path: str) -> None:
    anna, bert = KEYS
    prompt = path + PROMPT
    assert ask(two_keys, anna, path, prompt) == 0
    assert ask(two_keys, anna, path, prompt) > 0
    assert ask(two_keys, bert, path, prompt) == 0
    assert ask(two_keys, bert, path, prompt) > 0


def test_a_salt_divides_what_a_key_has_and_joins_no_two_keys(two_keys: ServerProcess) -> None:
    anna, bert = KEYS
    path, prompt = "/v1/completions", "salted " + PROMPT
    for key in KEYS:
        assert ask(two_keys, key, path, prompt) == 0
        assert ask(two_keys, key, path, prompt, cache_salt="") == 0
        assert ask(two_keys, key, path, prompt, cache_salt="s") == 0
        assert ask(two_keys, key, path, prompt, cache_salt="s") > 0
    assert ask(two_keys, anna, path, prompt) > 0
    assert ask(two_keys, bert, path, prompt) > 0


@pytest.mark.parametrize("flags", [("--share-prefix-cache",), ()], ids=["asked for", "no keys"])
def test_cached_prefixes_can_be_shared(
    serve_tiny: Callable[..., ServerProcess], flags: tuple[str, ...]
) -> None:
    keys = [flag for key in KEYS for flag in ("--api-key", key)] if flags else []
    server = serve_tiny(*flags, *keys)
    assert ask(server, KEYS[0], "/v1/completions", PROMPT) == 0
    assert ask(server, KEYS[1], "/v1/completions", PROMPT) > 0
    assert ask(server, KEYS[1], "/v1/completions", PROMPT, cache_salt="s") == 0


def test_a_restarted_engine_keeps_keys_apart(two_keys: ServerProcess) -> None:
    first = two_keys.engine_pid
    os.kill(first, signal.SIGKILL)
    eventually(lambda: two_keys.engine_pids() not in ({first}, set()))
    prompt = "after a restart " + PROMPT
    assert ask(two_keys, KEYS[0], "/v1/completions", prompt) == 0
    assert ask(two_keys, KEYS[0], "/v1/completions", prompt) > 0
    assert ask(two_keys, KEYS[1], "/v1/completions", prompt) == 0


def test_an_owner_tells_nothing_about_its_key() -> None:
    scope: Any = {"type": "http", "headers": [(b"x-api-key", b"weak")]}
    ring, other = (
        KeyRing(parse_api_keys("api_key", keys, "key")) for keys in (["weak", "strong"], ["weak"])
    )
    assert ring.owner(scope) == ring.owner(scope) != ""
    assert ring.owner(scope) != other.owner(scope), "a guess could be checked against it"
