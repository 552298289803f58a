"""What each field of a request does, over HTTP."""

from __future__ import annotations

import math
from typing import Any

import pytest
from server_process import ServerProcess, events

PROMPT = "The capital of France is"
PROMPT_IDS = [504, 3575, 282, 4649, 314]
LONG_IDS = (PROMPT_IDS * 600)[-2047:]  # room for one token; its blocks are computed once
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def complete(server: ServerProcess, **fields: Any) -> Any:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6, **fields}
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    return events(response.text) if fields.get("stream") else response.json()


def chat(server: ServerProcess, **fields: Any) -> Any:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 6, **fields}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    return events(response.text) if fields.get("stream") else response.json()


def texts(answer: Any) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def test_a_prompt_may_be_text_or_ids_one_or_several(server: ServerProcess) -> None:
    (alone,) = texts(complete(server))
    assert texts(complete(server, prompt=PROMPT_IDS)) == [alone]
    assert texts(complete(server, prompt=[PROMPT, PROMPT])) == [alone, alone]
    answer = complete(server, prompt=[PROMPT_IDS, PROMPT_IDS])
    assert texts(answer) == [alone, alone]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["prompt_tokens"] == 10
    assert answer["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("fields", [{}, {"max_tokens": None}], ids=["left out", "null"])
def test_a_completion_has_16_tokens_by_default(
    server: ServerProcess, fields: dict[str, Any]
) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, **fields}
    answer = server.post("/v1/completions", body).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


def test_choices_of_several_prompts_stand_together(server: ServerProcess) -> None:
    answer = complete(server, prompt=[PROMPT, "One, two, three,"], n=2)
    first, second, third, fourth = texts(answer)
    assert first == second != third == fourth
    pieces: dict[int, str] = {}
    for event in complete(server, prompt=[PROMPT, "One, two, three,"], n=2, stream=True)[:-1]:
        for choice in event["choices"]:
            pieces[choice["index"]] = pieces.get(choice["index"], "") + choice["text"]
    assert pieces == {0: first, 1: second, 2: third, 3: fourth}


def test_cached_tokens_are_counted_in_usage(server: ServerProcess) -> None:
    prompt = "Count with me, slowly and with care: one, two, three, four, five, six, seven, eight"
    salt = {"prompt": prompt, "cache_salt": "counted"}
    first = complete(server, **salt)["usage"]
    again = complete(server, **salt)["usage"]
    other = complete(server, prompt=prompt, cache_salt="other")["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["prompt_tokens_details"]["cached_tokens"] == 16
    assert other["prompt_tokens_details"]["cached_tokens"] == 0


def test_echo_begins_with_the_prompt_and_its_logprobs(server: ServerProcess) -> None:
    answer = complete(server, echo=True, logprobs=2, return_token_ids=True)["choices"][0]
    assert answer["text"].startswith(PROMPT)
    logprobs = answer["logprobs"]
    assert "".join(logprobs["tokens"]) == answer["text"]
    assert logprobs["token_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"][1:])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert answer["text"][offset:].startswith(token)
    assert answer["prompt_token_ids"] == PROMPT_IDS
    streamed = complete(server, echo=True, logprobs=2, stream=True)
    joined: dict[str, list[Any]] = {name: [] for name in logprobs}
    for event in streamed[:-1]:
        for name, values in event["choices"][0]["logprobs"].items():
            joined[name] += values
    assert joined == logprobs


def test_an_echo_of_no_tokens_is_the_prompt_alone(server: ServerProcess) -> None:
    answer = complete(server, echo=True, logprobs=0, max_tokens=0)
    assert texts(answer) == [PROMPT]
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == len(PROMPT_IDS)
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "Emoji: 🙂🎉🚀🙂🎉🚀🙂🎉", "max_tokens": 24},  # of several tokens each
        {"prompt": "Emoji: 🙂🎉🚀🙂🎉🚀🙂🎉", "max_tokens": 12, "echo": True},
        {"stop": [" not Paris at all", " is the", " was"], "max_tokens": 24},  # held back
        {"logit_bias": {"2": 90}, "ignore_eos": True, "max_tokens": 4},  # not shown
        {"prompt": [PROMPT, "One, two,"], "n": 2, "echo": True, "prompt_logprobs": 1},
    ],
)
def test_logprobs_in_pieces_are_those_of_the_whole_and_point_into_the_text(
    server: ServerProcess, fields: dict[str, Any]
) -> None:
    whole = complete(server, logprobs=1, **fields)["choices"]
    joined: dict[int, Any] = {}
    for event in complete(server, logprobs=1, stream=True, **fields)[:-1]:
        for piece in event["choices"]:
            choice = joined.setdefault(piece["index"], {"text": "", "logprobs": {}})
            choice["text"] += piece["text"]
            choice["prompt_logprobs"] = choice.get("prompt_logprobs") or piece.get(
                "prompt_logprobs"
            )
            for name, values in piece["logprobs"].items():
                choice["logprobs"][name] = choice["logprobs"].get(name, []) + values
    for choice in whole:
        same = joined[choice["index"]]
        assert same["text"] == choice["text"]
        assert same["logprobs"] == choice["logprobs"]
        assert same["prompt_logprobs"] == choice.get("prompt_logprobs")
        tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        assert offsets == sorted(offsets)
        for token, offset in zip(tokens, offsets, strict=True):
            rest = choice["text"][offset:]
            assert (
                rest.startswith(token)
                or token.startswith(rest)
                or "\ufffd" in token
                or (token == "<|im_end|>")
            )


def test_chat_logprobs_hold_the_most_likely_tokens_in_order(server: ServerProcess) -> None:
    answer = chat(server, logprobs=True, top_logprobs=3)["choices"][0]
    content = answer["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == answer["message"]["content"]
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        top = [item["logprob"] for item in entry["top_logprobs"]]
        assert len(top) == 3
        assert top == sorted(top, reverse=True)
        assert entry["logprob"] == top[0]  # greedy
        assert sum(map(math.exp, top)) <= 1.0001
    assert chat(server, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_prompt_logprobs_come_by_token_id(server: ServerProcess) -> None:
    positions = complete(server, prompt_logprobs=1)["choices"][0]["prompt_logprobs"]
    assert positions[0] is None
    for token_id, position in zip(PROMPT_IDS[1:], positions[1:], strict=True):
        assert position[str(token_id)]["logprob"] <= 0
        assert {entry["rank"] for entry in position.values()} >= {1}
    answer = chat(server, prompt_logprobs=0)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


def test_tokens_may_be_written_as_ids(server: ServerProcess) -> None:
    answer = complete(
        server, logprobs=0, return_tokens_as_token_ids=True, return_token_ids=True, max_tokens=2
    )
    choice = answer["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]


def test_stop_texts_end_the_output_before_themselves(server: ServerProcess) -> None:
    whole = complete(server, max_tokens=12)["choices"][0]["text"]
    assert "." in whole
    choice = complete(server, max_tokens=12, stop=["."])["choices"][0]
    assert choice["text"] == whole[: whole.index(".")]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ".")
    kept = complete(server, max_tokens=12, stop=".", include_stop_str_in_output=True)
    assert texts(kept) == [whole[: whole.index(".") + 1]]


def test_token_rules_are_obeyed(server: ServerProcess) -> None:
    (token,) = complete(server, max_tokens=1, return_token_ids=True)["choices"][0]["token_ids"]

    def first_token(**fields: Any) -> int:
        answer = complete(server, max_tokens=1, return_token_ids=True, **fields)
        return int(answer["choices"][0]["token_ids"][0])

    assert first_token(logit_bias={str(token): -100}) != token
    assert first_token(bad_words=["Paris"]) != token
    assert first_token(allowed_token_ids=[100, 200]) in (100, 200)
    stopped = complete(server, stop_token_ids=[token], return_token_ids=True)["choices"][0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", token)
    assert stopped["token_ids"] == [token]


def test_the_end_token_ends_unless_it_is_to_be_ignored(server: ServerProcess) -> None:
    eager = {"max_tokens": 12, "logit_bias": {"2": 100}}  # to end at once
    short = chat(server, **eager)
    assert short["usage"]["completion_tokens"] == 1
    assert short["choices"][0]["finish_reason"] == "stop"
    assert short["choices"][0]["message"]["content"] == ""
    assert chat(server, **eager, min_tokens=7)["usage"]["completion_tokens"] == 8
    long = chat(server, **eager, ignore_eos=True)
    assert long["usage"]["completion_tokens"] == 12
    assert long["choices"][0]["finish_reason"] == "length"


def test_prompts_are_truncated_from_either_side(server: ServerProcess) -> None:
    def prompt_ids(**fields: Any) -> Any:
        answer = complete(server, max_tokens=1, return_token_ids=True, **fields)
        return answer["choices"][0]["prompt_token_ids"]

    assert prompt_ids(truncate_prompt_tokens=2) == PROMPT_IDS[-2:]
    assert prompt_ids(truncate_prompt_tokens=2, truncation_side="right") == PROMPT_IDS[:2]
    assert prompt_ids(truncate_prompt_tokens=-1) == PROMPT_IDS
    assert prompt_ids(prompt=PROMPT_IDS * 600, truncate_prompt_tokens=-1) == LONG_IDS
    long = "one two three " * 100_000
    head = prompt_ids(prompt=long, truncate_prompt_tokens=5, truncation_side="right")
    assert head == prompt_ids(prompt="one two three one two")
    assert prompt_ids(prompt=long, truncate_prompt_tokens=2) == prompt_ids(prompt=" three ")


def test_the_last_message_can_be_continued(server: ServerProcess) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "The capital of France is the city of"}]
    fields = {"add_generation_prompt": False, "continue_final_message": True}
    answer = chat(server, messages=messages, **fields)
    assert answer["choices"][0]["message"]["content"].startswith(" Paris")
    echoed = chat(server, messages=messages, echo=True, **fields)
    said = messages[-1]["content"] + answer["choices"][0]["message"]["content"]
    assert echoed["choices"][0]["message"]["content"] == said
    pieces = chat(server, messages=messages, echo=True, stream=True, **fields)[:-1]
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in pieces) == said


def test_content_may_come_in_parts(server: ServerProcess) -> None:
    parts = [{"type": "text", "text": MESSAGES[0]["content"]}]
    messages = [{"role": "user", "content": parts}]
    same = chat(server, messages=messages)["choices"]
    assert same == chat(server)["choices"]


def test_usage_can_come_with_every_chunk(server: ServerProcess) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, done = chat(server, stream=True, stream_options=options)
    assert done == "[DONE]"
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert last["usage"]["completion_tokens"] == counts[-1] == 6


def test_numbers_and_booleans_may_come_as_texts(server: ServerProcess) -> None:
    spelled = {"max_tokens": "3", "temperature": "0", "top_k": "1", "seed": "7", "echo": "false"}
    (choice,) = complete(server, **spelled, n="1", logit_bias={"5": "-1.5"})["choices"]
    (same,) = complete(server, max_tokens=3)["choices"]
    assert choice == same
    chunks = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": "2", "stream": "true"})
    assert events(chunks.text)[-1] == "[DONE]"
    (choice,) = chat(server, logprobs="true", top_logprobs="2", max_tokens="1")["choices"]
    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 2
    body = {"model": "SmolLM2-135M-Instruct", "messages": MESSAGES, "max_tokens": "1"}
    assert server.post("/v1/messages", body).json()["usage"]["output_tokens"] == 1
    response = server.post("/v1/responses", {"input": "Hi", "max_output_tokens": "1"}).json()
    assert response["usage"]["output_tokens"] == 1


def test_a_text_that_spells_a_number_stays_a_text_where_one_may_stand(
    server: ServerProcess,
) -> None:
    assert complete(server, prompt="1", echo=True)["choices"][0]["text"].startswith("1")
    answer = complete(server, prompt=["1", "2"], echo=True)
    assert [choice["text"][0] for choice in answer["choices"]] == ["1", "2"]
    assert complete(server, stop="7")["choices"][0]["stop_reason"] in (None, "7")


def test_ids_are_the_clients_own(server: ServerProcess) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1}
    response = server.post("/v1/completions", body, headers={"X-Request-Id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    assert response.json()["id"] == "cmpl-mine-1"
    assert complete(server, request_id="other")["id"] == "cmpl-other"
    bad = server.post("/v1/completions", body, headers={"X-Request-Id": "no spaces"})
    assert bad.headers["x-request-id"] not in ("", "no spaces")


def test_unknown_fields_are_ignored(server: ServerProcess) -> None:
    assert complete(server, user="someone", metadata={"a": 1}, new_field=[1])


def test_text_becomes_tokens_and_text_again(server: ServerProcess) -> None:
    made = server.post("/tokenize", {"prompt": PROMPT, "return_token_strs": True}).json()
    assert made["tokens"] == PROMPT_IDS
    assert made["count"] == 5
    assert made["max_model_len"] == 2048
    assert made["token_strs"] == ["The", "Ġcapital", "Ġof", "ĠFrance", "Ġis"]
    assert server.post("/detokenize", {"tokens": PROMPT_IDS}).json() == {"prompt": PROMPT}
    conversation = server.post("/tokenize", {"messages": MESSAGES}).json()
    assert conversation["count"] == chat(server)["usage"]["prompt_tokens"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping"])
def test_health_is_an_empty_200(server: ServerProcess, path: str) -> None:
    assert server.get(path).status_code == 200
    assert server.get(path).content == b""


def test_max_tokens_beyond_the_context_is_what_fits(server: ServerProcess) -> None:
    body = {"prompt": LONG_IDS[:-7], "max_tokens": 10**6, "ignore_eos": True}
    reply = server.post("/v1/completions", body).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["total_tokens"] == 2048  # the server's --max-model-len


def test_a_field_that_is_refused_may_be_null(server: ServerProcess) -> None:
    body = {"prompt": "Hi", "max_tokens": 1, "guided_json": None, "prompt_embeds": None}
    assert server.post("/v1/completions", body).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ping", "/", "/v1/models", "/openapi.json"])
def test_a_head_is_a_get_without_its_body(server: ServerProcess, path: str) -> None:
    with server.client() as client:
        head = client.head(path)
        get = client.get(path)
    assert head.status_code == get.status_code == 200
    assert head.content == b""
    ours = ("content-length", "content-type")
    assert [head.headers.get(name) for name in ours] == [get.headers.get(name) for name in ours]


def test_the_prefix_cache_can_be_emptied(server: ServerProcess) -> None:
    body = {"prompt": [7] * 100, "max_tokens": 1}

    def num_cached() -> int:
        usage = server.post("/v1/completions", body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    num_cached()
    assert num_cached() > 0
    assert server.post("/reset_prefix_cache", None).status_code == 200
    assert num_cached() == 0
    assert num_cached() > 0


def test_version_and_docs_are_there(server: ServerProcess) -> None:
    import penstock

    assert server.get("/version").json() == {"version": penstock.__version__}
    assert server.get("/docs").status_code == 200
    paths = server.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models"} <= set(paths)


def test_beam_search_returns_the_likeliest_completions(server: ServerProcess) -> None:
    body = {"prompt": "The capital of France is", "max_tokens": 6, "return_token_ids": True}
    greedy = server.post("/v1/completions", {**body, "temperature": 0}).json()
    alone = server.post("/v1/completions", {**body, "use_beam_search": True}).json()
    assert alone["choices"] == greedy["choices"]
    beams = {**body, "use_beam_search": True, "n": 3}
    found = server.post("/v1/completions", beams).json()
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in found["choices"]}) == 3
    assert found["usage"]["completion_tokens"] == sum(
        len(choice["token_ids"]) for choice in found["choices"]
    )
    texts = ["", "", ""]
    for chunk in events(server.post("/v1/completions", {**beams, "stream": True}).text)[:-1]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in found["choices"]]


def test_a_conversation_can_be_searched_too(server: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "n": 2}
    found = server.post("/v1/chat/completions", {**body, "use_beam_search": True}).json()
    texts = [choice["message"]["content"] for choice in found["choices"]]
    assert len(set(texts)) == 2


def test_a_server_without_a_profiler_says_how_to_get_one(server: ServerProcess) -> None:
    answer = server.post("/start_profile", None)
    assert answer.status_code == 400
    assert "set profiler_config=" in answer.json()["error"]["message"]


def test_a_route_that_only_vllm_has_says_what_to_do(server: ServerProcess) -> None:
    answer = server.post("/inference/v1/generate", {"token_ids": [1]})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == (
        "there is no /inference/v1/generate here: use /v1/completions with token IDs and "
        "return_token_ids"
    )
