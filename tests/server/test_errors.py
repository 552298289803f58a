"""Every refusal has one shape, names the field and says what would be right."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ValidationError
from server_process import ServerProcess, events

from penstock.server.anthropic.protocol import MessagesRequest
from penstock.server.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
)
from penstock.server.responses.protocol import ResponseRequest

MESSAGES = [{"role": "user", "content": "Hi"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def check_shape(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] in (status, "context_length_exceeded")
    error: dict[str, Any] = body["error"]
    return error


CHAT_REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": [{"role": "user"}]}, "messages[0]", "content is missing"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "valid string"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]", "text only"),
    ({"temperature": "hot"}, "temperature", "valid number"),
    ({"temperature": "nan"}, "temperature", "finite number"),
    ({"temperature": 1e9}, "temperature", "at most 100"),
    ({"max_tokens": "many"}, "max_tokens", "valid integer"),
    ({"max_tokens": "1.5"}, "max_tokens", "valid integer"),
    ({"stream": "maybe"}, "stream", "valid boolean"),
    ({"timeout": "inf"}, "timeout", "finite number"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens must be at"),
    ({"n": 0}, "n", "at least 1"),
    ({"n": 1000}, "n", "at most 128"),
    ({"stop": [""]}, "stop", "non-empty"),
    ({"stop": ["x"] * 65}, "stop", "at most 64"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "from 0 to 20"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"999999999": 1}}, "logit_bias", "token ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "not be empty"),
    ({"allowed_token_ids": [5] * 49153}, "allowed_token_ids", "at most 49152"),
    ({"cache_salt": "x" * 1025}, "cache_salt", "at most 1024 characters"),
    ({"structured_outputs": {"regex": "x" * 2**19}, "n": 128}, "n", "prompts times n must be"),
    ({"allowed_token_ids": [2], "min_tokens": 1}, "allowed_token_ids", "min_tokens"),
    ({"allowed_token_ids": [28120], "bad_words": ["hello"]}, "allowed_token_ids", "bad_words"),
    ({"stop_token_ids": [*range(49152)], "min_tokens": 1}, "stop_token_ids", "leave a token"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty", "at least 0.01"),
    ({"request_id": "a\nE 2026 forged"}, "request_id", "pattern"),
    ({"request_id": "x" * 129}, "request_id", "pattern"),
    ({"continue_final_message": True}, "continue_final_message", "cannot be combined"),
    ({"chat_template": "{{ x }}"}, "chat_template", "--chat-template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "separate field"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
        "response_format.json_schema.schema",
        "Invalid type: x",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed group"),
    ({"structured_outputs": {"jason": {}}}, "structured_outputs.jason", "not permitted"),
    (
        {"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "cannot be combined",
    ),
    ({"audio": {"voice": "x"}}, "audio", "not supported"),
    ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
    ({"best_of": 2}, "best_of", "not supported"),
    ({"use_beam_search": True, "stop": ["a"]}, "stop", "cannot be combined with use_beam_search"),
    ({"use_beam_search": True, "length_penalty": 11}, "length_penalty", "at most 10"),
    ({"guided_json": {"type": "object"}}, "guided_json", "structured_outputs"),
    ({"guided_regex": "a+"}, "guided_regex", '{"regex"'),
    ({"guided_choice": ["a", "b"]}, "guided_choice", '{"choice"'),
    ({"guided_grammar": "root ::= x"}, "guided_grammar", '{"grammar"'),
    ({"guided_json_object": True}, "guided_json_object", "structured_outputs"),
    ({"guided_whitespace_pattern": "x"}, "guided_whitespace_pattern", "structured_outputs"),
    ({"guided_decoding_backend": "x"}, "guided_decoding_backend", "structured_outputs_backend"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds", "text or token IDs"),
    ({"logprob_token_ids": [1] * 129}, "logprob_token_ids", "at most 128"),
    ({"logprob_token_ids": [49152]}, "logprob_token_ids", "token ids from 0 to 49151"),
    ({"logprob_token_ids": ["x"]}, "logprob_token_ids[0]", "valid integer"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "-1 are all 49152"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "-1 are all 49152"),
    ({"logits_processors": ["m.C"]}, "logits_processors", "of the engine"),
    ({"repetition_detection": {"min_count": 2}}, "repetition_detection", "max_tokens"),
    ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params", "in one engine"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"timeout": 0}, "timeout", "above 0"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
]


@pytest.mark.parametrize(
    ("fields", "param", "remedy"),
    CHAT_REFUSALS,
    ids=[repr(fields)[:80] for fields, _, _ in CHAT_REFUSALS],
)
def test_a_wrong_chat_request_is_refused_by_name(
    server: ServerProcess, fields: dict[str, Any], param: str, remedy: str
) -> None:
    for stream in (False, True):
        body = {"messages": MESSAGES, "max_tokens": 1, "stream": stream, **fields}
        if "stream_options" in fields:
            body["stream"] = False
        error = check_shape(server.post("/v1/chat/completions", body), 400)
        assert error["type"] == "BadRequestError"
        assert error["param"] == param
        assert remedy in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"prompt_embeds": ["AAAA"]}, "prompt_embeds"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": ["x"] * 1025}, "prompt"),
        ({"prompt": ["x"] * 1024, "n": 128}, "prompt"),
        ({"prompt": "a " * 10_000_000}, "prompt"),
        ({"cache_salt": "x" * 2000}, "cache_salt"),
        ({"prompt": ["x"] * 1000, "structured_outputs": {"regex": "x" * 90_000}}, "prompt"),
        ({"prompt": [5] * 3000}, "prompt"),
        ({"prompt": [5] * 2000, "n": 128, "prompt_logprobs": 4}, "prompt_logprobs"),
        ({"prompt": [[5] * 2000] * 15, "n": 2, "echo": True, "logprobs": 20}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_wrong_completion_request_is_refused_by_name(
    server: ServerProcess, fields: dict[str, Any], param: str
) -> None:
    error = check_shape(server.post("/v1/completions", {"prompt": "Hi", **fields}), 400)
    assert error["param"] == param


def test_a_prompt_with_a_wrong_token_id_is_told_which_one(server: ServerProcess) -> None:
    error = check_shape(server.post("/v1/completions", {"prompt": [5, -1]}), 400)
    assert "prompt[1]: Input should be greater than or equal to 0" in error["message"]


NESTED: Any = 1
for _ in range(900):
    NESTED = {"a": NESTED}


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": NESTED},
        {"documents": [NESTED]},
        {"messages": [{"role": "user", "content": "Hi", "more": NESTED}]},
    ],
    ids=["kwargs", "documents", "messages"],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_what_is_nested_too_deeply_for_a_template_is_refused(
    server: ServerProcess, path: str, fields: dict[str, Any]
) -> None:
    body = {"messages": MESSAGES, **fields}
    assert "less deeply" in check_shape(server.post(path, body), 400)["message"]


def test_a_body_that_cannot_be_decoded_is_told_what_would_be_right(server: ServerProcess) -> None:
    with server.client() as client:
        headers = {"Content-Type": "application/json"}
        response = client.post("/v1/completions", content=b'{"prompt": "\xff"}', headers=headers)
    assert "UTF-8" in check_shape(response, 400)["message"]


NO_UNICODE = {"type": "object", "title": "\ud800"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": NO_UNICODE}}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS}, "tools"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "tools"),
        ({"response_format": {"type": "structural_tag", "format": NO_UNICODE}}, "response_format"),
    ],
    ids=["tools", "required", "format", "tag"],
)
def test_half_a_character_is_refused_by_the_name_of_what_holds_it(
    server: ServerProcess, fields: dict[str, Any], param: str
) -> None:
    content = json.dumps({"messages": MESSAGES, **fields})  # the client would not write it
    with server.client() as client:
        headers = {"Content-Type": "application/json"}
        response = client.post("/v1/chat/completions", content=content, headers=headers)
    error = check_shape(response, 400)
    assert error["param"] == param
    assert "lone surrogate" in error["message"]


def test_an_argument_of_a_template_may_have_any_name(server: ServerProcess) -> None:
    for name in ("self", "cls", "args", ""):
        body = {"messages": MESSAGES, "chat_template_kwargs": {name: 1}}
        assert server.post("/tokenize", body).status_code == 200


@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        (b"{", "application/json"),
        (b"[" * 100_000, "application/json"),
        (b"\xff\xfe", "application/json"),
        (b"null", "application/json"),
        (b'{"prompt": NaN}', "application/json"),
        (b'{"prompt": "\\ud800"}', "application/json"),
        (b'{"prompt": "x", "stop": "\\ud800"}', "application/json"),
        (b'{"prompt": "x", "temperature": 1e999}', "application/json"),
        (b'{"prompt": "x", "temperature": 1' + b"0" * 400 + b"}", "application/json"),
        (b'{"prompt": "x", "seed": 1' + b"0" * 400 + b"}", "application/json"),
        (b'{"prompt": "x"}', "text/plain"),
        (b"", "application/json"),
    ],
)
def test_a_body_that_is_no_request_is_refused(
    server: ServerProcess, content: bytes, content_type: str
) -> None:
    with server.client() as client:
        response = client.post(
            "/v1/completions", content=content, headers={"Content-Type": content_type}
        )
    check_shape(response, 400)


def test_a_request_that_runs_out_of_tokens_to_choose_is_told_which_fields_do_that(
    server: ServerProcess,
) -> None:
    (seven,) = server.post("/tokenize", {"prompt": "7"}).json()["tokens"]
    body = {"prompt": "Hi", "max_tokens": 9, "allowed_token_ids": [seven], "bad_words": ["777"]}
    error = check_shape(server.post("/v1/completions", body), 400)
    assert error["param"] == "allowed_token_ids"
    assert "bad_words" in error["message"]
    assert "after 2 tokens of output" in error["message"]

    response = server.post("/v1/completions", {**body, "stream": True})
    assert response.status_code == 200
    *chunks, fault, end = events(response.text)  # a chunk may contain both tokens
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "77"
    assert fault == {"error": error}
    assert end == "[DONE]"


def test_what_is_not_http_is_refused_in_the_same_shape(server: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=120) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
    headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
    check_shape(httpx.Response(int(head.split()[1]), headers=headers, content=body), 400)


def test_what_is_not_there_is_a_404(server: ServerProcess) -> None:
    assert "/docs" in check_shape(server.get("/v1/nothing"), 404)["message"]
    check_shape(server.get("/v1/models/other/one"), 404)
    body = {"model": "other", "messages": MESSAGES}
    error = check_shape(server.post("/v1/chat/completions", body), 404)
    assert error["param"] == "model"
    assert "'other'" in error["message"]


def test_a_method_that_is_not_there_is_a_405(server: ServerProcess) -> None:
    response = server.get("/v1/chat/completions")
    check_shape(response, 405)
    assert response.headers["allow"] == "POST"


def test_token_ids_beyond_the_vocabulary_are_refused(server: ServerProcess) -> None:
    assert check_shape(server.post("/detokenize", {"tokens": [49152]}), 400)["param"] == "tokens"
    check_shape(server.post("/tokenize", {}), 400)


def test_a_request_that_takes_too_long_is_a_408(server: ServerProcess) -> None:
    body = {"prompt": "Hi", "timeout": 0.01}
    with server.engine_stopped():  # no token comes in time, however fast a step is
        assert "0.01 s" in check_shape(server.post("/v1/completions", body), 408)["message"]
        check_shape(server.post("/v1/completions", {**body, "stream": True}), 408)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CompletionRequest, {"prompt": ["a", 1] * 1000}),
        (CompletionRequest, {"prompt": [[1, "a"]] * 1000}),
        (CompletionRequest, {"prompt": "a", "allowed_token_ids": ["a"] * 1000}),
        (CompletionRequest, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(99)), "a")}),
        (DetokenizeRequest, {"tokens": [-1] * 1000}),
        (ChatCompletionRequest, {"messages": [{"role": 1, "content": 2}] * 1000}),
        (MessagesRequest, {"model": "m", "max_tokens": 1, "messages": [{"role": "x"}] * 1000}),
        (ResponseRequest, {"input": [{"role": "x"}] * 1000}),
        (ResponseRequest, {"input": "a", "metadata": dict.fromkeys(map(str, range(99)), 1)}),
    ],
)
def test_complaints_end_with_the_first_wrong_item(
    kind: type[BaseModel], fields: dict[str, Any]
) -> None:
    """Millions of them would hold up the whole server."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(fields)
    assert caught.value.error_count() < 10
