"""What answers hold beside their text, where clients of vLLM look for it: usage, nulls and more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import DUMMY, ServerProcess, events

from penstock.config import EngineConfig
from penstock.server.run import system_fingerprint

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "[[abcdef]]"}]},
    TEXT: {"prompt": "user: [[abcdef]]"},
}
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}


@pytest.fixture(scope="module")
def flagged(tiny_model: Path) -> Iterator[ServerProcess]:
    """A server with each of vLLM's flags for answers the other way round."""
    flags = ("--enable-force-include-usage", "--return-tokens-as-token-ids")
    with ServerProcess(
        str(tiny_model), *DUMMY, *flags, "--no-enable-prompt-tokens-details"
    ) as process:
        yield process


def answer(server: ServerProcess, path: str, **fields: Any) -> Any:
    response = server.post(path, {**BODIES[path], "max_tokens": 8, **fields})
    assert response.status_code == 200, response.text
    return events(response.text)[:-1] if fields.get("stream") else response.json()


# -- usage


def test_continuous_usage_begins_at_0_and_counts_up(scripted_server: ServerProcess) -> None:
    chunks = answer(scripted_server, CHAT, stream=True, stream_options=CONTINUOUS)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] == 7  # the last chunk has the usage alone
    assert chunks[-1]["choices"] == []
    for chunk in chunks:
        usage = chunk["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("options", [{}, {"include_usage": False}], ids=["unset", "off"])
def test_continuous_usage_needs_include_usage(
    scripted_server: ServerProcess, path: str, options: dict[str, Any]
) -> None:
    asked = {**options, "continuous_usage_stats": True}
    chunks = answer(scripted_server, path, stream=True, stream_options=asked)
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_the_server_may_end_every_stream_with_its_usage(flagged: ServerProcess, path: str) -> None:
    for fields in ({}, {"stream_options": {"include_usage": False}}):
        *chunks, last = answer(flagged, path, stream=True, **fields)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] > 0
        assert not any(chunk["usage"] for chunk in chunks)
    chunks = answer(flagged, path, stream=True, stream_options={"continuous_usage_stats": True})
    assert all(chunk["usage"] for chunk in chunks)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_details_of_prompt_tokens_can_be_left_out(
    scripted_server: ServerProcess, flagged: ServerProcess, path: str
) -> None:
    assert answer(scripted_server, path)["usage"]["prompt_tokens_details"] is not None
    assert answer(flagged, path)["usage"]["prompt_tokens_details"] is None
    assert answer(flagged, path, stream=True)[-1]["usage"]["prompt_tokens_details"] is None


# -- tokens in logprobs


def test_the_server_may_write_tokens_as_ids_unless_a_request_says_otherwise(
    flagged: ServerProcess,
) -> None:
    for asked, is_id in ((None, True), (True, True), (False, False)):
        fields: dict[str, Any] = {"return_tokens_as_token_ids": asked}
        chat = answer(flagged, CHAT, logprobs=True, top_logprobs=1, **fields)["choices"][0]
        text = answer(flagged, TEXT, logprobs=1, **fields)["choices"][0]
        tokens = [entry["token"] for entry in chat["logprobs"]["content"]]
        for token in [*tokens, *text["logprobs"]["tokens"]]:
            assert token.startswith("token_id:") == is_id


# -- fingerprint and nulls


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_every_answer_has_the_same_fingerprint(scripted_server: ServerProcess, path: str) -> None:
    whole = answer(scripted_server, path)
    streamed = answer(scripted_server, path, stream=True, stream_options=CONTINUOUS)
    prints = {reply["system_fingerprint"] for reply in [whole, *streamed]}
    assert len(prints) == 1
    assert prints.pop().startswith("fp_")


def test_a_fingerprint_tells_what_may_answer_differently() -> None:
    def fingerprint(model: str = "a", **options: Any) -> str:
        return system_fingerprint(EngineConfig.from_options(options), model)

    assert fingerprint() == fingerprint() == fingerprint(max_num_seqs=3)
    others = [fingerprint("b"), fingerprint(dtype="float32"), fingerprint(quantization="fp8")]
    assert len({fingerprint(), *others}) == 4


def test_a_whole_chat_has_null_where_there_is_nothing(scripted_server: ServerProcess) -> None:
    reply = answer(scripted_server, CHAT)
    for name in ("service_tier", "prompt_logprobs", "prompt_token_ids", "kv_transfer_params"):
        assert reply[name] is None
    (choice,) = reply["choices"]
    for name in ("logprobs", "stop_reason", "token_ids", "routed_experts"):
        assert choice[name] is None
    for name in ("refusal", "annotations", "audio", "function_call", "reasoning"):
        assert choice["message"][name] is None


def test_a_whole_completion_has_null_where_there_is_nothing(scripted_server: ServerProcess) -> None:
    reply = answer(scripted_server, TEXT)
    for name in ("service_tier", "kv_transfer_params"):
        assert reply[name] is None
    (choice,) = reply["choices"]
    for name in ("logprobs", "stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs"):
        assert choice[name] is None


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_chunks_have_null_for_token_ids_that_nobody_asked_for(
    scripted_server: ServerProcess, path: str
) -> None:
    chunks = answer(scripted_server, path, stream=True)
    first = chunks[0] if path == CHAT else chunks[0]["choices"][0]
    assert first["prompt_token_ids"] is None
    for chunk in chunks[1:]:
        assert chunk["choices"][0]["token_ids"] is None


# -- logprobs


@pytest.fixture(scope="module")
def unlimited(tiny_model: Path) -> Iterator[ServerProcess]:
    """A server that reports as many log-probabilities as there are tokens."""
    process = ServerProcess(str(tiny_model), *DUMMY, "--max-logprobs", "257")  # the vocabulary
    yield process
    process.close()


def test_minus_one_asks_for_all_logprobs(unlimited: ServerProcess) -> None:
    fields: dict[str, Any] = {"max_tokens": 2, "prompt_logprobs": -1, "ignore_eos": True}
    reply = answer(unlimited, CHAT, logprobs=True, top_logprobs=-1, **fields)
    content = reply["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [257, 257]
    values = [entry["logprob"] for entry in content[0]["top_logprobs"]]
    assert values == sorted(values, reverse=True)
    first, *others = reply["prompt_logprobs"]
    assert first is None
    assert all(len(position) == 257 for position in others)
    choice = answer(unlimited, TEXT, logprobs=-1, **fields)["choices"][0]
    assert all(len(position) == 257 for position in choice["prompt_logprobs"][1:])


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_can_be_named_whose_logprobs_are_reported(
    unlimited: ServerProcess, stream: bool
) -> None:
    named = [65, 97, 98]
    fields: dict[str, Any] = {"logprob_token_ids": named, "temperature": 0, "max_tokens": 2}
    fields |= {"return_tokens_as_token_ids": True, "ignore_eos": True}
    everything = answer(unlimited, CHAT, **{**fields, "logprob_token_ids": None}, logprobs=True,
                        top_logprobs=-1)["choices"][0]["logprobs"]["content"]  # fmt: skip
    asked = answer(unlimited, CHAT, stream=stream, **fields)
    replies = asked if stream else [asked]
    content = [
        entry
        for reply in replies
        for choice in reply["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert len(content) == 2
    for ours, all_of_them in zip(content, everything, strict=True):
        expected = {entry["token"]: entry["logprob"] for entry in all_of_them["top_logprobs"]}
        tokens = {entry["token"]: entry["logprob"] for entry in ours["top_logprobs"]}
        assert set(tokens) == {ours["token"], *(f"token_id:{token_id}" for token_id in named)}
        for token, logprob in tokens.items():
            assert logprob == pytest.approx(expected[token])
    replies = answer(unlimited, TEXT, stream=stream, **fields)
    tops = [
        top
        for reply in (replies if stream else [replies])
        for choice in reply["choices"]
        for top in choice["logprobs"]["top_logprobs"]
    ]
    assert len(tops) == 2
    assert all({f"token_id:{token_id}" for token_id in named} <= set(top) for top in tops)
