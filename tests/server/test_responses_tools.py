"""Tools of an MCP server, called by this server for the model: both in processes of their own."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from scripted import make_scripted_model
from server_process import DUMMY, ServerProcess
from waiting import eventually

from penstock.config import ServerConfig
from penstock.protocol.errors import ConfigError
from penstock.server.responses.tool_servers import connect_tool_servers

HERE = Path(__file__).parent
MCP: Any = {"type": "mcp", "server_label": "warehouse", "require_approval": "never"}
MAX_ROUNDS = 3


class ToolServerProcess:
    def __init__(self, *flags: str) -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            self.port = bound.getsockname()[1]
            command = [sys.executable, str(HERE / "mcp_server.py"), str(bound.fileno()), *flags]
            self._process = subprocess.Popen(command, pass_fds=[bound.fileno()])
        eventually(self._listens)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def tool_server() -> Iterator[ToolServerProcess]:
    process = ToolServerProcess()
    yield process
    process.close()


@pytest.fixture(scope="module")
def client(
    tool_server: ToolServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    """A model that says what it is told, with the tools of the tool server."""
    folder = make_scripted_model(tmp_path_factory.mktemp("scripted"))
    process = ServerProcess(
        str(folder),
        *DUMMY,
        *("--logits-processors", "scripted:Script", "--served-model-name", "scripted"),
        *("--tool-server", f"http://127.0.0.1:{tool_server.port}/mcp"),
        *("--tool-call-timeout-s", "60", "--max-tool-rounds", str(MAX_ROUNDS)),
        *("--max-tool-output-bytes", "1000"),
        env={"PYTHONPATH": str(HERE)},
    )
    with process.openai() as client:
        yield client
    process.close()


def script_of(name: str, arguments: dict[str, Any]) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"[[<tool_call>{call}</tool_call>]]"


def test_a_call_is_made_and_the_model_answers_with_what_came_of_it(client: openai.OpenAI) -> None:
    options: Any = {
        "model": "scripted",
        "tools": [MCP],
        "input": script_of("count_stock", {"item": "bolts"}),
    }
    whole = client.responses.create(**options)
    events = list(client.responses.create(stream=True, **options))
    types = [event.type for event in events]
    first_of_call = types.index("response.mcp_call.in_progress")
    assert types[:7] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.mcp_list_tools.in_progress",
        "response.mcp_list_tools.completed",
        "response.output_item.done",
        "response.output_item.added",
    ]
    others = [kind for kind in types[first_of_call:] if not kind.endswith(".delta")]
    assert others == [
        "response.mcp_call.in_progress",
        "response.mcp_call_arguments.done",
        "response.mcp_call.completed",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for response in (whole, events[-1].response):  # type: ignore[union-attr]
        listed, call, message = response.output
        assert listed.type == "mcp_list_tools"
        assert "count_stock" in [tool.name for tool in listed.tools]
        assert call.type == "mcp_call"
        assert call.server_label == "warehouse"
        assert call.status == "completed"
        assert json.loads(call.arguments) == {"item": "bolts"}
        assert call.output == "There are 42 of bolts. [[Plenty of bolts.]]"
        assert message.type == "message"
        assert response.output_text == "Plenty of bolts."
        assert response.usage is not None
        # The second round reads the first one's prompt from the cache.
        assert response.usage.input_tokens_details.cached_tokens > 100
    # What was called is part of the conversation that goes on.
    following = client.responses.create(
        model="scripted", input="[[Bye.]]", previous_response_id=whole.id, tools=[MCP]
    )
    assert [item.type for item in following.output] == ["message"]
    items = list(client.responses.input_items.list(following.id, order="asc"))
    kinds = ["message", "mcp_list_tools", "mcp_call", "message", "message"]
    assert [item.type for item in items] == kinds


def test_a_tool_that_fails_is_told_to_the_model(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="scripted", tools=[MCP], input=script_of("fail", {"reason": "rain"})
    )
    _, call, _ = response.output
    assert call.type == "mcp_call"
    assert call.status == "failed"
    assert "broken because of rain" in json.dumps(call.to_dict()["error"])
    assert response.output_text == "Sorry."


def test_long_outputs_are_cut_off(client: openai.OpenAI) -> None:
    response = client.responses.create(model="scripted", tools=[MCP], input=script_of("flood", {}))
    call = response.output[1]
    assert call.type == "mcp_call"
    assert call.output is not None
    assert len(call.output) < 1100
    assert "99009 more bytes were cut off" in call.output
    assert response.output_text == "Much."


def test_calls_end_after_so_many_rounds(client: openai.OpenAI) -> None:
    options: Any = {"model": "scripted", "tools": [MCP], "input": script_of("again", {})}
    response = client.responses.create(**options)
    assert response.status == "completed"
    kinds = [item.type for item in response.output]
    assert kinds == ["mcp_list_tools", *["mcp_call"] * MAX_ROUNDS, "message"]
    limited = client.responses.create(max_tool_calls=1, **options)
    assert [item.type for item in limited.output] == ["mcp_list_tools", "mcp_call", "message"]


def test_the_limit_of_tokens_is_one_for_all_rounds(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="scripted", tools=[MCP], input=script_of("again", {}), max_output_tokens=100
    )
    assert response.status == "incomplete"
    assert response.usage is not None
    assert response.usage.output_tokens == 100


def test_calls_of_the_client_end_the_response(client: openai.OpenAI) -> None:
    first = script_of("count_stock", {"item": "nuts"})[2:-2]
    second = script_of("mine", {})[2:-2]
    response = client.responses.create(
        model="scripted",
        tools=[MCP, {"type": "function", "name": "mine", "parameters": None, "strict": False}],
        input=f"[[{first}{second}]]",
    )
    assert [item.type for item in response.output] == [
        "mcp_list_tools",
        "mcp_call",
        "function_call",
    ]
    call = response.output[1]
    assert call.type == "mcp_call"
    assert call.status == "completed"


def test_a_named_tool_is_called_once_and_not_for_ever(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="scripted",
        tools=[MCP],
        tool_choice={"type": "mcp", "server_label": "warehouse", "name": "count_stock"},
        input=script_of("count_stock", {"item": "screws"}),
        extra_body={"seed": 1},  # of arguments that are not the script's
    )
    assert [item.type for item in response.output] == ["mcp_list_tools", "mcp_call", "message"]


def test_only_allowed_tools_are_offered(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="scripted", tools=[{**MCP, "allowed_tools": ["web_search"]}], input="[[Hi.]]"
    )
    (listed, _) = response.output
    assert listed.type == "mcp_list_tools"
    assert [tool.name for tool in listed.tools] == ["web_search"]
    with pytest.raises(openai.BadRequestError, match="no tool 'other'"):
        client.responses.create(
            model="scripted", tools=[{**MCP, "allowed_tools": ["other"]}], input="[[Hi.]]"
        )


def test_a_built_in_tool_may_come_from_a_tool_server(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="scripted",
        tools=[{"type": "web_search"}],
        input=script_of("web_search", {"query": "[[Nothing found.]]"}),
        tool_choice="auto",
    )
    assert response.status == "completed"
    with pytest.raises(openai.BadRequestError, match="file_search is not built in here"):
        client.responses.create(
            model="scripted",
            tools=[{"type": "file_search", "vector_store_ids": []}],
            input="[[Hi.]]",
        )


def test_no_other_address_is_ever_called(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="there is no tool server"):
        client.responses.create(
            model="scripted",
            tools=[{**MCP, "server_url": "http://127.0.0.1:1/mcp"}],
            input="[[Hi.]]",
        )


def test_approval_is_refused_since_nobody_is_asked(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="never"):
        client.responses.create(
            model="scripted", tools=[{**MCP, "require_approval": "always"}], input="[[Hi.]]"
        )


def test_the_default_model_calls_a_tool_over_sse(default_model: str) -> None:
    tools = ToolServerProcess("sse")
    server = ServerProcess(
        default_model,
        *("--cpu-threads", "1", "--kv-cache-memory-bytes", "256MiB", "--max-model-len", "2048"),
        *("--no-spare-engine", "--tool-server", f"127.0.0.1:{tools.port}"),
    )
    try:
        response = server.openai().responses.create(
            model=default_model,
            tools=[{**MCP, "allowed_tools": ["count_parts"]}],
            tool_choice="required",
            parallel_tool_calls=False,
            input="How many bolts are there?",
            temperature=0,
            max_output_tokens=48,
        )
        call = response.output[1]
        assert call.type == "mcp_call"
        assert call.status == "completed"
        assert call.output == f"There are 42 {json.loads(call.arguments)['part']}."
        assert response.output[2].type == "message"
    finally:
        server.close()
        tools.close()


def test_calls_take_only_so_long(tool_server: ToolServerProcess) -> None:
    async def check() -> None:
        config = ServerConfig(
            tool_server=[f"http://127.0.0.1:{tool_server.port}/mcp"], tool_call_timeout_s=0.5
        )
        known = await connect_tool_servers(config)
        result = await known.call(known.servers[0], "nap", "{}")
        assert result.error is not None
        assert "longer than 0.5 s" in result.error["message"]

    asyncio.run(check())


def test_a_tool_server_that_cannot_be_reached_is_said_at_the_start(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "penstock", "serve", str(tiny_model), *DUMMY, "--port", "0"]
    ended = subprocess.run(
        [*command, "--tool-server", "127.0.0.1:1"], capture_output=True, text=True
    )
    assert ended.returncode != 0
    assert "the tool server at http://127.0.0.1:1/sse cannot be used" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("http://127.0.0.1:1/mcp", "the tool server at http://127.0.0.1:1/mcp cannot be used"),
        ("ftp://x/y", "must be host:port or a URL"),
    ],
)
def test_addresses_that_cannot_be_used_are_refused(entry: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        asyncio.run(connect_tool_servers(ServerConfig(tool_server=[entry])))


def test_two_servers_of_one_name_are_refused(tool_server: ToolServerProcess) -> None:
    url = f"http://127.0.0.1:{tool_server.port}/mcp"
    with pytest.raises(ConfigError, match="'warehouse'"):
        asyncio.run(connect_tool_servers(ServerConfig(tool_server=[f"{url},{url}"])))
