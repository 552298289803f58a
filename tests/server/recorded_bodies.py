"""Requests whose answers are recorded, and how answers are made comparable.

To record them anew, on purpose, from a server of the scripted model (`scripted_server`):
``python tests/server/recorded_bodies.py http://localhost:PORT``.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import httpx

CHAT, TEXT, RESPONSES, MESSAGES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
)  # fmt: skip
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = '<tool_call>{"name": "get_time", "arguments": {"city": "Rome"}}</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "get_time", "description": "The time.", "parameters": PARAMETERS},
}
FLAT_TOOL = {"type": "function", "name": "get_time", "parameters": PARAMETERS}
THEIR_TOOL = {"name": "get_time", "input_schema": PARAMETERS}


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"[[{text}]]"}]


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": (TEXT, {"prompt": "[[Hello there.]]", "max_tokens": 40}),
    "completion cut": (TEXT, {"prompt": "[[Hello there.]]", "max_tokens": 5}),
    "completion stopped": (TEXT, {"prompt": "[[One, two.]]", "stop": [","], "echo": True}),
    "completions": (TEXT, {"prompt": ["[[a]]", "[[b]]"], "n": 2, "max_tokens": 4}),
    "completion logprobs": (TEXT, {"prompt": "[[Hi.]]", "logprobs": 1, "max_tokens": 8}),
    "completion stream": (TEXT, {"prompt": "[[Hello.]]", "stream": True,
                                 "stream_options": {"include_usage": True}}),
    "completion regex": (TEXT, {"prompt": "[[17]]", "structured_outputs": {"regex": "[0-9]+"}}),
    "chat": (CHAT, {"messages": said("Hello there.")}),
    "chat cut": (CHAT, {"messages": said("Hello there."), "max_tokens": 5}),
    "chat logprobs": (CHAT, {"messages": said("Hi."), "logprobs": True, "top_logprobs": 1}),
    "chat stream": (CHAT, {"messages": said("Hello."), "stream": True,
                           "stream_options": {"include_usage": True}}),
    "chat reasoning": (CHAT, {"messages": said("hm</think>Yes."),
                              "chat_template_kwargs": {"enable_thinking": True}}),
    "chat call": (CHAT, {"messages": said(CALL), "tools": [TOOL]}),
    "chat call stream": (CHAT, {"messages": said(CALL), "tools": [TOOL], "stream": True}),
    "chat schema": (CHAT, {"messages": said('{"x": 5}'), "response_format": {
        "type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}),
    "response": (RESPONSES, {"input": "[[Hello there.]]", "store": False}),
    "response cut": (RESPONSES, {"input": "[[Hello there.]]", "max_output_tokens": 5}),
    "response call": (RESPONSES, {"input": f"[[{CALL}]]", "tools": [FLAT_TOOL]}),
    "response schema": (RESPONSES, {"input": '[[{"x": 5}]]', "text": {"format": {
        "type": "json_schema", "name": "x", "schema": SCHEMA}}}),
    "response logprobs": (RESPONSES, {"input": "[[Hi.]]", "top_logprobs": 1,
                                      "include": ["message.output_text.logprobs"]}),
    "response stream": (RESPONSES, {"input": "[[Hello.]]", "stream": True}),
    "message": (MESSAGES, {"messages": said("Hello there."), "max_tokens": 40}),
    "message cut": (MESSAGES, {"messages": said("Hello there."), "max_tokens": 5}),
    "message stopped": (MESSAGES, {"messages": said("One, two."), "max_tokens": 40,
                                   "stop_sequences": [","]}),
    "message call": (MESSAGES, {"messages": said(CALL), "max_tokens": 99, "tools": [THEIR_TOOL]}),
    "message stream": (MESSAGES, {"messages": said("Hello."), "max_tokens": 40, "stream": True}),
    "tokenize": ("/tokenize", {"prompt": "Hé"}),
    "detokenize": ("/detokenize", {"tokens": [40, 41]}),
    "wrong temperature": (CHAT, {"messages": said("Hi."), "temperature": -1}),
    "wrong field": (TEXT, {"prompt": "x", "max_tokens": "many"}),
    "wrong role": (CHAT, {"messages": [{"role": "bad", "content": "x"}]}),
    "wrong model": (TEXT, {"prompt": "x", "model": "other"}),
    "wrong schema": (CHAT, {"messages": said("Hi."), "response_format": {
        "type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}}),
    "wrong input": (RESPONSES, {"input": []}),
    "wrong message": (MESSAGES, {"messages": [], "max_tokens": 4}),
    "too long": (TEXT, {"prompt": [5] * 5000}),
    "nowhere": ("/v1/nothing", {}),
}  # fmt: skip
# Ids and times, what tells one build from another, and what depends on a processor's rounding.
BLANK_KEYS = (
    "created", "created_at", "completed_at", "system_fingerprint", "item_id", "call_id",
    "request_id", "sequence_number", "logprob",
)  # fmt: skip
COUNTED_KEYS = ("token_logprobs", "top_logprobs")  # lists of which the length is kept
IDS = re.compile(r"\b(cmpl|chatcmpl|resp|msg|fc|rs|call|toolu|chatcmpl-tool)[-_][0-9a-zA-Z-]{8,}")


def blanked(value: Any) -> Any:
    """`value` without what differs from one run to the next."""
    if isinstance(value, dict):
        return {key: _blanked_field(key, item) for key, item in value.items()}
    if isinstance(value, list):
        return [blanked(item) for item in value]
    return IDS.sub("...", value) if isinstance(value, str) else value


def _blanked_field(key: str, value: Any) -> Any:
    if key in COUNTED_KEYS and isinstance(value, list):
        return len(value)
    return "..." if key in BLANK_KEYS and value else blanked(value)


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream, however its text is cut: each kind of event once in a row, its texts joined."""
    kinds: list[str] = []
    pieces: dict[str, str] = {}
    last: dict[str, Any] = {}
    for event in events:
        kind = event.get("type") or "chunk"
        kinds += [kind] if kinds[-1:] != [kind] else []
        last[kind] = event
        for path, text in texts_of(event):
            pieces[path] = pieces.get(path, "") + text
    for choice in last[kinds[-1]].get("choices", []):
        choice.pop("delta", None), choice.pop("text", None)  # all of it, or the last piece
    return {"kinds": kinds, "texts": pieces, "end": last[kinds[-1]]}


def texts_of(event: Any, path: str = "") -> list[tuple[str, str]]:
    if isinstance(event, dict):
        return [pair for k, v in event.items() for pair in texts_of(v, f"{path}.{k}")]
    if isinstance(event, list):
        return [pair for item in event for pair in texts_of(item, path)]
    is_text = isinstance(event, str) and re.search(
        r"^\.choices\.(text|delta\.(content|reasoning|tool_calls\.function\.arguments))$"
        r"|^\.delta(\.(text|partial_json))?$",
        path,
    )
    return [(path, event)] if is_text else []


def answer_to(client: httpx.Client, name: str) -> dict[str, Any]:
    """Status and body of a request's answer, blanked."""
    path, body = REQUESTS[name]
    assert client.post("/reset_prefix_cache").status_code == 200  # so that usage is the same, too
    fields = {"model": "scripted", "temperature": 0, **body}
    response = client.post(path, json=fields)
    if response.headers["content-type"].startswith("text/event-stream"):
        lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        events = [json.loads(line) for line in lines if line != "[DONE]"]
        return {"status": response.status_code, "stream": blanked(joined(events))}
    return {"status": response.status_code, "body": blanked(response.json())}


if __name__ == "__main__":
    with httpx.Client(base_url=sys.argv[1], timeout=120) as client:
        found = {name: answer_to(client, name) for name in REQUESTS}
    json.dump(found, sys.stdout, indent=1, sort_keys=True)
    print()
