"""Tools without a server: what a model that says what it is told writes, `LLM.chat` can read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripted import Script, make_scripted_model
from test_tools import ARGUMENTS, CALL, TOOLS, say

from penstock import LLM, SamplingParams
from penstock.protocol.errors import InputError

SMALL: Any = {"load_format": "dummy", "kv_cache_memory_bytes": "64MiB", "cpu_threads": 1}


def test_what_a_model_writes_can_be_read_offline(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=200, skip_special_tokens=False)
    with LLM(str(make_scripted_model(tmp_path)), logits_processors=[Script], **SMALL) as llm:
        (output,) = llm.chat(
            say(f"so</think>Look.{CALL}"),
            params,
            tools=TOOLS,
            chat_template_kwargs={"enable_thinking": True},
            parse_output=True,
            use_tqdm=False,
        )
    message = output.outputs[0].message
    assert message is not None
    assert output.outputs[0].finish_reason == "tool_calls"  # as the chat APIs say it
    assert (message.reasoning, message.content) == ("so", "Look.")
    assert json.loads(message.tool_calls[0].arguments) == ARGUMENTS


def test_each_choice_of_an_offline_chat_is_read_for_itself(tmp_path: Path) -> None:
    whole = SamplingParams(n=2, max_tokens=200)
    cut = SamplingParams(n=2, max_tokens=4)
    with LLM(str(make_scripted_model(tmp_path)), logits_processors=[Script], **SMALL) as llm:
        ask: Any = {"tools": TOOLS, "parse_output": True, "use_tqdm": False}
        outputs = llm.chat([say(f"Look.{CALL}"), say("Look.")], [whole, cut], **ask)
        for item in outputs[0].outputs:
            assert item.message is not None
            assert item.message.content == "Look."
            assert json.loads(item.message.tool_calls[0].arguments) == ARGUMENTS
        for item in outputs[1].outputs:
            assert item.message is not None
            assert (item.finish_reason, item.message.tool_calls) == ("length", [])
        wrong: list[Any] = [
            {"tools": 5},
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
            {"tools": [{"type": "function", "function": {"name": "f", "description": 1}}]},
        ]
        for options in wrong:
            with pytest.raises(InputError, match="tools"):
                llm.chat(say("x"), whole, **{**ask, **options})
        with pytest.raises(InputError, match="parse_output"):
            llm.chat(say("x"), whole, tools=TOOLS, tool_choice="required")
