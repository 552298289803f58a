"""Events of the Responses API: whatever a model writes, they add up to its items."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.errors import InputError
from penstock.protocol.outputs import Logprob
from penstock.server.openai.logprobs import LogprobFormat
from penstock.server.openai.tools import MAX_TOOLS, MAX_TOOLS_LENGTH, check_tools
from penstock.server.responses.convert import check_body
from penstock.server.responses.output import Output
from penstock.server.responses.protocol import ResponseRequest
from penstock.server.responses.routes import ResponsesFrame
from penstock.server.responses.tool_servers import ToolResult, ToolServer
from penstock.text.parsing import deltas as parsed
from penstock.text.parsing.formats import Tool

OURS = ToolServer("shed", "http://shed/mcp", (Tool("ours"),))
pieces = st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=3)
segments = st.lists(
    st.tuples(
        st.sampled_from(["say", "think", "theirs", "ours", "broken theirs", "broken ours"]), pieces
    ),
    max_size=6,
)


def deltas_of(written: Sequence[tuple[str, list[str]]]) -> list[parsed.Delta]:
    deltas: list[parsed.Delta] = []
    for index, (kind, texts) in enumerate(written):
        if kind == "say":
            deltas += [parsed.ContentDelta(text) for text in texts]
        elif kind == "think":
            deltas += [parsed.ReasoningDelta(text) for text in texts]
        else:
            deltas.append(parsed.ToolCallStart(index, f"call_{index}", kind.split()[-1]))
            deltas += [parsed.ToolCallArguments(index, text) for text in texts]
            is_broken = kind.startswith("broken")
            deltas.append(
                parsed.ToolCallBroken(index, "?") if is_broken else parsed.ToolCallEnd(index)
            )
    return deltas


def expected_items(written: Sequence[tuple[str, list[str]]]) -> list[tuple[str, str]]:
    """Type and text of each item; what is said or thought in a row is one."""
    items: list[tuple[str, str]] = []
    for kind, texts in written:
        text = "".join(texts)
        if kind in ("theirs", "ours"):
            items.append(("function_call" if kind == "theirs" else "mcp_call", text))
            continue
        item_type, text = ("reasoning", text) if kind == "think" else ("message", text)
        if kind.startswith("broken"):
            items.append(("broken", ""))
            text = "?"
        if items and items[-1][0] == item_type:
            items[-1] = (item_type, items[-1][1] + text)
        else:
            items.append((item_type, text))
    return [item for item in items if item[0] != "broken"] or [("message", "")]


def replay(events: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The items as a client follows them; fails where events contradict each other."""
    growing: dict[int, dict[str, Any]] = {}
    done: dict[int, dict[str, Any]] = {}
    for event in events:
        index, kind = event["output_index"], event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert index == len(growing)
            growing[index] = copy.deepcopy(event["item"])
            continue
        assert index not in done, "nothing follows the end of an item"
        item = growing[index]
        if kind == "output_item.done":
            final = event["item"]
            assert final["id"] == item["id"]
            if "content" in item:
                assert final["content"] == item["content"]
            if "arguments" in item:
                assert final["arguments"] == item["arguments"]
            assert final["status"] != "in_progress"
            done[index] = final
            continue
        assert event["item_id"] == item["id"]
        if kind == "content_part.added":
            item["content"].append(copy.deepcopy(event["part"]))
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            item["content"][event["content_index"]]["text"] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert item["content"][event["content_index"]]["text"] == event["text"]
        elif kind.endswith("arguments.delta"):
            item["arguments"] += event["delta"]
        elif kind.endswith("arguments.done"):
            assert item["arguments"] == event["arguments"]
    assert set(done) == set(growing), "every item ends"
    return done


def text_of(item: dict[str, Any]) -> str:
    return str(item["arguments"] if "arguments" in item else item["content"][0]["text"])


@given(segments, st.lists(st.integers(1, 5), max_size=30))
def test_events_add_up_to_what_was_written_however_it_is_cut(
    written: list[tuple[str, list[str]]], sizes: list[int]
) -> None:
    output = Output({"ours": OURS}, LogprobFormat(None, 0, False))
    events: list[dict[str, Any]] = []
    output.begin_round()
    deltas = deltas_of(written)
    for size in [*sizes, len(deltas) + 1]:
        step, deltas = deltas[:size], deltas[size:]
        events += copy.deepcopy(list(output.take(step, None)))
    events += output.end_round(is_cut_off=False)
    for item in output.round_items():
        if item["type"] == "mcp_call":
            assert item["status"] == "in_progress"
            events += output.finish_call(item, ToolResult("fine"))
    told = replay(events)
    assert [(item["type"], text_of(item)) for item in output.items] == expected_items(written)
    shown = [item for _, item in sorted(told.items()) if item["status"] != "incomplete"]
    assert shown == output.items
    assert all(item["status"] == "completed" for item in output.items)


@given(segments, pieces)
def test_what_is_cut_off_is_incomplete(
    written: list[tuple[str, list[str]]], texts: list[str]
) -> None:
    output = Output({"ours": OURS}, LogprobFormat(None, 0, False))
    output.begin_round()
    unfinished: list[parsed.Delta] = [
        parsed.ToolCallStart(99, "call_99", "theirs"),
        *[parsed.ToolCallArguments(99, text) for text in texts],
    ]
    events = list(output.take([*deltas_of(written), *unfinished], None))
    events += output.end_round(is_cut_off=True)
    assert output.items[-1]["status"] == "incomplete"
    assert output.items[-1]["arguments"] == "".join(texts)
    assert events[-1]["type"] == "response.output_item.done"


def test_an_error_on_the_wire_is_an_event_of_its_own_type() -> None:
    name, data = ResponsesFrame("r").error(InputError("no", "input")).split("\n")[:2]
    assert name == "event: error"
    told = json.loads(data.removeprefix("data: "))
    assert told == {
        "type": "error", "code": "invalid_prompt", "message": "no", "param": "input",
    }  # fmt: skip


def test_what_is_echoed_must_be_json() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"maximum": math.inf}}
    with pytest.raises(InputError, match="tools must be plain JSON"):
        check_body(ResponseRequest.model_validate({"input": "Hi.", "tools": [tool]}))


def test_tools_that_are_too_many_or_too_large_or_named_alike_are_refused() -> None:
    tools = [Tool(f"tool_{index}") for index in range(MAX_TOOLS)]
    check_tools(tools)
    with pytest.raises(InputError, match="'tool_7' twice"):
        check_tools([*tools[:-1], Tool("tool_7")])
    with pytest.raises(InputError, match="at most 1024, got 1025"):
        check_tools([*tools, Tool("more")])
    large = Tool("large", {"type": "object", "description": "x" * MAX_TOOLS_LENGTH})
    with pytest.raises(InputError, match="characters long together"):
        check_tools([large])


@pytest.mark.parametrize("comes_alone", [False, True])
def test_the_token_that_ends_a_message_has_its_logprob_however_it_comes(comes_alone: bool) -> None:
    said, end = {65: Logprob(-1.0, 1, "A")}, {0: Logprob(-2.0, 1, "<end>")}
    output = Output({}, LogprobFormat(None, 0, False))
    output.begin_round()
    steps = [[said], [end]] if comes_alone else [[said, end]]
    for number, logprobs in enumerate(steps):
        list(output.take([] if number else [parsed.ContentDelta("A")], logprobs))
    *_, done = output.end_round(is_cut_off=False)
    (part,) = done["item"]["content"]
    assert [entry["token"] for entry in part["logprobs"]] == ["A", "<end>"]
