"""Tools on models whose template knows none, the default model among them, with the official
clients: as agent frameworks send them, without a choice of tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import openai
import pytest
from scripted import make_scripted_model
from server_process import ServerProcess, start_scripted
from test_tool_choice import CHAT_TOOLS, HERMES, MESSAGE_TOOLS, PARIS, RESPONSE_TOOLS

QUESTION: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
CALLED: Any = [
    *QUESTION,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": json.dumps(PARIS)},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


def prompt_of(server: ServerProcess, body: Any) -> str:
    ids = server.post("/tokenize", body).json()["tokens"]
    prompt = server.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert isinstance(prompt, str)
    return prompt


def test_the_default_model_takes_tools_without_a_choice(
    client: openai.OpenAI, default_model: str
) -> None:
    for messages in (QUESTION, CALLED):
        options: Any = {
            "model": default_model, "messages": messages, "tools": CHAT_TOOLS, "max_tokens": 8,
        }  # fmt: skip
        assert client.chat.completions.create(**options).choices[0].finish_reason
        assert list(client.chat.completions.create(stream=True, **options))
    answer = client.responses.create(
        model=default_model, input="Hi.", tools=RESPONSE_TOOLS, max_output_tokens=8
    )
    assert answer.status in ("completed", "incomplete")


def test_the_default_model_is_shown_tools_calls_and_results(server: ServerProcess) -> None:
    prompt = prompt_of(server, {"messages": CALLED, "tools": CHAT_TOOLS})
    assert prompt.startswith("<|im_start|>system\n# Tools")
    for tool in CHAT_TOOLS:
        assert json.dumps(tool["function"]["name"]) in prompt
    assert f"<|im_start|>assistant\n{HERMES}<|im_end|>" in prompt
    assert "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>" in prompt
    assert "# Tools" not in prompt_of(server, {"messages": QUESTION})


def test_the_default_model_goes_through_a_loop_of_tools(
    server: ServerProcess, default_model: str
) -> None:
    """The first call is demanded; what comes after it the model decides."""
    with anthropic.Anthropic(base_url=server.base_url, api_key="none") as client:
        options: Any = {"model": default_model, "tools": MESSAGE_TOOLS, "max_tokens": 64}
        first = client.messages.create(
            messages=QUESTION, tool_choice={"type": "tool", "name": "get_weather"}, **options
        )
        (block,) = first.content
        assert (block.type, first.stop_reason) == ("tool_use", "tool_use")
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}  # type: ignore[union-attr]
        said: Any = [
            *QUESTION,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
        ]
        assert client.messages.create(messages=said, **options).content


@pytest.mark.parametrize("question", ["What is the weather in Paris?", "Tell me about Rome."])
def test_the_default_model_ends_after_a_required_call(
    client: openai.OpenAI, default_model: str, question: str
) -> None:
    answer = client.chat.completions.create(
        model=default_model, messages=[{"role": "user", "content": question}], tools=CHAT_TOOLS,
        tool_choice="required", temperature=0, max_tokens=300,
    )  # fmt: skip
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None


@pytest.fixture(scope="module")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The model that says what it is told, with a template that shows nothing but messages."""
    folder = make_scripted_model(tmp_path_factory.mktemp("plain"))
    config = {"eos_token": "<end>", "chat_template": PLAIN}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with start_scripted(folder) as process:
        yield process


def test_calls_are_read_as_the_model_was_told_to_write_them(plain_server: ServerProcess) -> None:
    for script in (HERMES, f"I look.\n{HERMES}{HERMES}"):
        body = {
            "messages": [{"role": "user", "content": f"[[{script}]]"}], "tools": CHAT_TOOLS,
        }  # fmt: skip
        choice = plain_server.post("/v1/chat/completions", body).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == (None if script == HERMES else "I look.")
        for call in choice["message"]["tool_calls"]:
            assert json.loads(call["function"]["arguments"]) == PARIS


def test_choosing_can_be_turned_off(serve_tiny: Callable[..., ServerProcess]) -> None:
    server = serve_tiny("--no-enable-auto-tool-choice")
    body = {"messages": QUESTION, "tools": CHAT_TOOLS, "max_tokens": 4}
    refused = server.post("/v1/chat/completions", body)
    assert refused.status_code == 400
    assert "--no-enable-auto-tool-choice" in refused.json()["error"]["message"]
    reply = server.post("/v1/chat/completions", {**body, "tool_choice": "none"})
    assert reply.status_code == 200
