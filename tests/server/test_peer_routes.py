"""Routes that clients of vLLM know, and paths that end with a slash."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import DUMMY, ServerProcess, events

CHAT = "/v1/chat/completions"


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"[[{text}]]"}]


@pytest.fixture(scope="module")
def guarded(tiny_model: Path) -> Iterator[ServerProcess]:
    """A server with keys, under a path, and without /tokenizer_info."""
    with ServerProcess(
        str(tiny_model),
        *DUMMY,
        *("--api-key", "key", "--admin-api-key", "root", "--root-path", "/llm"),
        "--no-enable-tokenizer-info-endpoint",
    ) as process:
        yield process


# -- /invocations


def test_an_invocation_is_a_chat_or_a_completion(scripted_server: ServerProcess) -> None:
    chat = scripted_server.post("/invocations", {"messages": say("Hello"), "max_tokens": 9}).json()
    assert chat["object"] == "chat.completion"
    assert chat["choices"][0]["message"]["content"] == "Hello"
    text = scripted_server.post("/invocations", {"prompt": "[[Hello]]", "max_tokens": 9}).json()
    assert (text["object"], text["choices"][0]["text"]) == ("text_completion", "Hello")
    body = {"prompt": "[[Hello]]", "stream": True}
    assert events(scripted_server.post("/invocations", body).text)[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"messages": say("x"), "top_p": "x"}, "top_p"),
        ({"messages": 3}, "messages"),
        ({"prompt": "x", "n": [1]}, "n"),
        ({"prompt": "x" * 300_000, "n": [1]}, "n"),
        ([], None),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_wrong_invocation_is_told_which_field(
    scripted_server: ServerProcess, body: Any, param: str | None
) -> None:
    response = scripted_server.post("/invocations", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


# -- /v1/chat/completions/batch


def test_a_batch_of_conversations_has_a_choice_for_each(scripted_server: ServerProcess) -> None:
    texts = ["One", "Three words long", "Two words"]
    alone = [
        scripted_server.post(CHAT, {"messages": say(text), "max_tokens": 32}).json()
        for text in texts
    ]
    body = {"messages": [say(text) for text in texts], "max_tokens": 32, "request_id": "mine"}
    reply = scripted_server.post(f"{CHAT}/batch", body).json()
    assert (reply["object"], reply["id"]) == ("chat.completion", "chatcmpl-mine")
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in reply["choices"]] == texts
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert reply["usage"][name] == sum(answer["usage"][name] for answer in alone)


def test_fields_of_a_batch_hold_for_each_conversation(scripted_server: ServerProcess) -> None:
    body = {"messages": [say("abcdef"), say("ghijkl")], "max_tokens": 2, "logprobs": True}
    choices = scripted_server.post(f"{CHAT}/batch", body).json()["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["ab", "gh"]
    assert [choice["finish_reason"] for choice in choices] == ["length", "length"]
    assert all(len(choice["logprobs"]["content"]) == 2 for choice in choices)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": say("a")}, "messages[0]"),
        ({"messages": [say("a"), []]}, "messages[1]"),
        ({"messages": [say("a"), [{"role": "bad", "content": "x"}]]}, "messages"),
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"messages": [say("a")] * 1025}, "messages"),
        ({"messages": [say("a")] * 128, "structured_outputs": {"regex": "x" * 2**19}}, "messages"),
        ({"guided_json": {}}, "guided_json"),
        ({"temperature": -1}, "temperature"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_wrong_batch_is_refused_by_name(
    scripted_server: ServerProcess, fields: dict[str, Any], param: str
) -> None:
    response = scripted_server.post(f"{CHAT}/batch", {"messages": [say("a"), say("b")], **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


# -- /tokenizer_info


def test_the_tokenizer_is_described(
    scripted_server: ServerProcess, server: ServerProcess, guarded: ServerProcess
) -> None:
    info = scripted_server.get("/tokenizer_info").json()  # from a folder
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert info["eos_token"] == "<end>"
    assert "<tool_call>" in info["chat_template"]
    assert info["max_model_len"] == 4096
    info = server.get("/tokenizer_info").json()  # from a GGUF file
    assert (info["eos_token"], info["vocab_size"]) == ("<|im_end|>", 49152)
    assert "<|im_start|>" in info["chat_template"]
    headers = {"Authorization": "Bearer key"}
    assert guarded.get("/llm/tokenizer_info", headers=headers).status_code == 404


# -- slashes


def test_a_slash_at_the_end_of_a_path_does_not_matter(scripted_server: ServerProcess) -> None:
    for path in ("/v1/models/", "/health/", "/v1/models//", "/v1/models/scripted/"):
        assert scripted_server.get(path).status_code == 200
    body = {"messages": say("Hello"), "max_tokens": 9}
    for path in (f"{CHAT}/", f"{CHAT}/batch/"):
        asked = {**body, "messages": [body["messages"]]} if "batch" in path else body
        reply = scripted_server.post(path, asked).json()
        assert reply["choices"][0]["message"]["content"] == "Hello"
    refused = scripted_server.post("/v1/messages/", {"model": "x"}).json()
    assert refused["type"] == "error"  # in Anthropic's shape


def test_a_slash_at_the_end_opens_nothing(guarded: ServerProcess) -> None:
    key, root = ({"Authorization": f"Bearer {name}"} for name in ("key", "root"))
    for prefix in ("", "/llm"):
        assert guarded.get(f"{prefix}/v1/models/").status_code == 401
        assert guarded.get(f"{prefix}/v1/models/", headers=key).status_code == 200
        assert guarded.get(f"{prefix}/health/").status_code == 200
        reset = f"{prefix}/reset_prefix_cache/"
        assert guarded.post(reset, None, headers=key).status_code == 401
        assert guarded.post(reset, None, headers=root).status_code == 200
        assert guarded.get(f"{prefix}/").status_code == 200


def test_pages_are_where_their_files_find_them(scripted_server: ServerProcess) -> None:
    response = scripted_server.get("/docs/")
    assert (response.status_code, response.headers["location"]) == (307, "../docs")
    with scripted_server.client(follow_redirects=True) as client:
        assert client.get("/docs/").text == client.get("/docs").text
