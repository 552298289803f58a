"""What the API answered before its house was rebuilt, body for body, and what has changed since."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from recorded_bodies import REQUESTS, answer_to
from server_process import ServerProcess

RECORDED = json.loads((Path(__file__).parent / "recorded" / "bodies.json").read_text())
# Absent then, and null now, where clients of vLLM look for them.
NEW_NULLS = {
    "annotations", "audio", "completion_tokens_details", "conversation", "function_call",
    "kv_transfer_params", "prompt_logprobs", "prompt_token_ids", "reasoning", "routed_experts",
    "service_tier", "token_ids", "tool_calls",
}  # fmt: skip
NEW_KEYS = {"system_fingerprint"}
# Errors in other words: those that clients match, and of fields that take numbers as strings.
CHANGED_ERRORS = {
    "too long": {
        "code": "context_length_exceeded",
        "message": "This model's maximum context length is 4096 tokens. However, you requested "
        "5001 tokens (5000 in the prompt, 1 for the completion), so the prompt is too long. "
        "Please reduce the length of the prompt.",
    },
    "wrong field": {
        "message": "max_tokens: Input should be a valid integer, unable to parse string as an "
        "integer",
    },
}


def without_news(now: Any, then: Any) -> Any:
    """`now` without the fields that it may have more than `then`."""
    if isinstance(now, dict) and isinstance(then, dict):
        news = {
            key
            for key, value in now.items()
            if key not in then and (key in NEW_KEYS or (key in NEW_NULLS and value is None))
        }
        return {k: without_news(v, then.get(k)) for k, v in now.items() if k not in news}
    if isinstance(now, list) and isinstance(then, list) and len(now) == len(then):
        return [without_news(ours, theirs) for ours, theirs in zip(now, then, strict=True)]
    return now


@pytest.mark.parametrize("name", REQUESTS)
def test_an_answer_is_the_recorded_one(scripted_server: ServerProcess, name: str) -> None:
    expected = copy.deepcopy(RECORDED[name])
    if name in CHANGED_ERRORS:
        expected["body"]["error"] |= CHANGED_ERRORS[name]
    with scripted_server.client() as client:
        found = answer_to(client, name)
    assert without_news(found, expected) == expected


def test_what_is_new_can_be_told_from_what_is_wrong() -> None:
    then = {"a": 1, "list": [{"b": None}]}
    assert without_news({"a": 1, "list": [{"b": None, "audio": None}]}, then) == then
    assert without_news({"a": 1, "list": [{"b": None, "audio": 1}]}, then) != then
    assert without_news({"a": 1, "list": [{}]}, then) != then
    assert without_news({"a": 1, "list": [{"b": None}], "more": None}, then) != then
