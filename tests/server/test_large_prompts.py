"""Prompts of many megabytes cost an error, little memory, and nobody else anything."""

from __future__ import annotations

import contextlib
import json
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import DUMMY, ServerProcess, make_tiny_model
from waiting import eventually

MIB = 2**20
LARGE = "a b " * (31 * MIB // 4)
# Tokens take more than 250 bytes for each byte of text: gigabytes for a body of 31 MiB. What two
# such bodies take at once, and what stays until the allocator gives it back:
MOST_AT_ONCE = 500 * MIB  # measured: 100 to 230, by path
MOST_AFTER = 200 * MIB  # measured: up to 100
MOST_ADDRESSES = 1536 * MIB  # measured: 670 to 770; threads reserve more than they use
FREE = {"prompt": "The cat sat on", "max_tokens": 24, "temperature": 0}
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def post(server: ServerProcess, path: str, body: Any) -> httpx.Response:
    return server.post(path, body, timeout=300)


def pages_of(pid: int, field: int) -> int:
    """Bytes of a process: all that it maps (0), or what is in memory (1); 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[field]) * resource.getpagesize()
    except OSError:
        return 0


def is_confined(pid: int) -> bool:
    try:
        return "penstock.confined" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def memory_of(server: ServerProcess) -> int:
    """Of the API process and the confined processes that it has started."""
    confined = filter(is_confined, server.child_pids())
    return sum(pages_of(pid, 1) for pid in (server.process.pid, *confined))


@contextlib.contextmanager
def watched(server: ServerProcess) -> Iterator[list[int]]:
    """Collects how much memory there was meanwhile."""
    seen = [memory_of(server)]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            seen.append(memory_of(server))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


IDS = [1000] * (31 * MIB // 6)
BODIES: dict[str, Any] = {
    "/detokenize": {"tokens": IDS},
    "/tokenize": {"prompt": LARGE},
    "/v1/completions": {"prompt": LARGE, "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LARGE}]},
    "/v1/responses": {"input": LARGE},
    "/v1/responses/input_tokens": {"input": LARGE},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": LARGE}], "model": "x"},
}


SHORT = ("/detokenize", "/tokenize", "/v1/chat/completions")  # the others take their ways


@pytest.mark.parametrize(
    "path",
    [
        *SHORT,
        *(pytest.param(path, marks=pytest.mark.slow) for path in BODIES if path not in SHORT),
    ],
)
def test_two_bodies_of_31_mib_at_once_cost_less_than_500_mib(
    server: ServerProcess, path: str
) -> None:
    model = post(server, "/v1/completions", FREE).json()["model"]
    good = post(server, "/v1/completions", FREE).json()["choices"]
    body = {**BODIES[path], "model": model}
    before = memory_of(server)
    with watched(server) as seen, ThreadPoolExecutor(3) as threads:
        answers = [threads.submit(post, server, path, body) for _ in range(2)]
        beside = threads.submit(post, server, "/v1/completions", FREE)
        for answer in answers:
            assert answer.result().status_code == 400, answer.result().text
            assert "token" in answer.result().text
        assert beside.result().json()["choices"] == good
    assert max(seen) - before < MOST_AT_ONCE
    # Confined processes stay for a while; what they took for these texts is given back.
    eventually(lambda: memory_of(server) - before < MOST_AFTER)


def test_a_server_with_little_memory_to_spare_survives_them(tmp_path: Path) -> None:
    without_bound(make_tiny_model(tmp_path))
    server = ServerProcess(str(tmp_path), *DUMMY)
    limit = pages_of(server.process.pid, 0) + MOST_ADDRESSES
    resource.prlimit(server.process.pid, resource.RLIMIT_AS, (limit, limit))
    with ThreadPoolExecutor(2) as threads:
        bodies = [BODIES["/tokenize"]] * 2
        answers = list(threads.map(lambda body: post(server, "/tokenize", body), bodies))
    assert [answer.status_code for answer in answers] == [400, 400]
    assert "and may have 1048576" in answers[0].json()["error"]["message"]
    assert post(server, "/v1/completions", FREE).status_code == 200
    server.close()


def without_bound(model: Path) -> None:
    """Give a tokenizer one token that takes the blanks beside it: no length tells the tokens."""
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"][0]["lstrip"] = True
    path.write_text(json.dumps(content))


def test_eight_mb_of_spaces_are_refused_and_seven_tokens_of_them_are_had(
    server: ServerProcess,
) -> None:
    spaces = {"prompt": " " * (8 * MIB), "max_tokens": 1}
    answer = post(server, "/v1/completions", spaces)
    assert answer.status_code == 400
    assert "more than 1048576 characters without a boundary" in answer.json()["error"]["message"]
    answer = post(server, "/tokenize", spaces)
    assert answer.status_code == 400
    body = {"prompt": LARGE, "max_tokens": 1, "truncate_prompt_tokens": 7}
    answer = post(server, "/v1/completions", body)
    assert answer.json()["usage"]["prompt_tokens"] == 7


def test_templates_without_end_hold_up_no_other_request(
    serve_tiny: Callable[..., ServerProcess],
) -> None:
    server = serve_tiny("--trust-request-chat-template")
    messages = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "temperature": 0}
    good = post(server, "/v1/chat/completions", messages).json()["choices"]

    def leave() -> None:
        body = {**messages, "chat_template": ENDLESS}
        with server.client() as client, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/chat/completions", json=body, timeout=httpx.Timeout(60, read=1.0))

    with ThreadPoolExecutor(8) as threads:
        leaving = [threads.submit(leave) for _ in range(8)]
        own = {**messages, "chat_template": "{{ messages[0].content }}"}
        assert post(server, "/v1/chat/completions", own).status_code == 200
        assert post(server, "/v1/chat/completions", messages).json()["choices"] == good
        for future in leaving:
            future.result()
