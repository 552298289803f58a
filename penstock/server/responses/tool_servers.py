"""Tool servers: MCP servers whose tools this server calls for models.

It connects only to servers that the operator configured. Tools are listed once, at the start. Each
call uses a new connection, so a tool server may be restarted in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from penstock.config import ServerConfig
from penstock.protocol.errors import ConfigError
from penstock.text.parsing.formats import Tool

if TYPE_CHECKING:
    from mcp import Client

    from penstock.server.operations.tracing import Tracing

START_TIMEOUT_S = 30.0
MAX_TOOL_PAGES = 100


@dataclass(frozen=True)
class ToolServer:
    """One tool server. `label` is the name that it reports."""

    label: str
    url: str
    tools: tuple[Tool, ...]


@dataclass(frozen=True)
class ToolResult:
    """The result of a call: `output`, or `error` in the API's format if it failed."""

    output: str | None
    error: dict[str, Any] | None = None

    @classmethod
    def failed(cls, message: str) -> ToolResult:
        """The result of a call that reached no tool."""
        return cls(None, {"type": "mcp_protocol_error", "code": -32000, "message": message})


class ToolServers:
    """All configured tool servers and the limits of their calls."""

    def __init__(
        self, servers: Sequence[ToolServer], call_timeout_s: float, max_output_bytes: int
    ) -> None:
        self.servers = servers
        self._call_timeout_s = call_timeout_s
        self._max_output_bytes = max_output_bytes
        self.tracing: Tracing | None = None

    def find(self, label: str, url: str | None) -> ToolServer | None:
        """Find a server by its URL if given, else by its label."""
        for server in self.servers:
            if (server.label == label) if url is None else (server.url == url.rstrip("/")):
                return server
        return None

    def find_tool(self, name: str) -> tuple[ToolServer, Tool] | None:
        for server in self.servers:
            for tool in server.tools:
                if tool.name == name:
                    return server, tool
        return None

    async def call(self, server: ToolServer, name: str, arguments: str) -> ToolResult:
        """Call a tool. Errors of the tool or its server are results, not exceptions."""
        limit_s = self._call_timeout_s
        try:
            given = json.loads(arguments or "{}")
            if self.tracing is None:
                return await asyncio.wait_for(self._call(server, name, given), limit_s)
            with self.tracing.call_tool(server.label, name) as trace:
                return await asyncio.wait_for(self._call(server, name, given, trace), limit_s)
        except (asyncio.TimeoutError, TimeoutError):
            return ToolResult.failed(f"{name} took longer than {limit_s:g} s")
        except Exception as error:  # a foreign server can cause any error in its client
            return ToolResult.failed(f"{name} could not be called: {_cause(error)}")

    async def _call(
        self,
        server: ToolServer,
        name: str,
        arguments: dict[str, Any],
        trace: dict[str, str] | None = None,
    ) -> ToolResult:
        async with _connect(server.url) as client:
            meta: Any = trace  # MCP passes W3C's trace context in a call's metadata
            result = await client.call_tool(name, arguments, meta=meta)
        text = self._cut("\n".join(_text_of(part) for part in result.content))
        if result.is_error:
            return ToolResult(None, {"type": "mcp_tool_execution_error", "content": text})
        return ToolResult(text)

    def _cut(self, text: str) -> str:
        encoded = text.encode(errors="replace")
        if len(encoded) <= (most := self._max_output_bytes):
            return encoded.decode()
        kept = encoded[:most].decode(errors="ignore")
        return f"{kept}\n[{len(encoded) - most} more bytes were cut off]"


async def connect_tool_servers(config: ServerConfig) -> ToolServers:
    """List the tools of every tool server. Raises ConfigError if one cannot be reached."""
    entries = [entry.strip() for given in config.tool_server for entry in given.split(",")]
    servers: list[ToolServer] = []
    for entry in filter(None, entries):
        server = await _list_tools(_url_of(entry))
        if any(server.label == other.label for other in servers):
            raise ConfigError(
                f"two tool servers call themselves {server.label!r}: give them different names"
            )
        servers.append(server)
    return ToolServers(servers, config.tool_call_timeout_s, config.max_tool_output_bytes)


def _url_of(entry: str) -> str:
    """Convert an entry to a URL. ``host:port`` means a server with SSE at /sse."""
    url = (entry if "://" in entry else f"http://{entry}").rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"tool_server must be host:port or a URL such as http://localhost:9000/mcp, got "
            f"{entry!r}"
        )
    return url if parts.path or "://" in entry else f"{url}/sse"


async def _list_tools(url: str) -> ToolServer:
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "tool_server needs the mcp package: pip install 'penstock[tools]'"
        ) from error

    async def ask() -> ToolServer:
        tools: list[Tool] = []
        async with _connect(url) as client:
            cursor: str | None = None
            for _ in range(MAX_TOOL_PAGES):
                page = await client.list_tools(cursor=cursor)
                tools += [
                    Tool(tool.name, tool.input_schema, tool.description or "")
                    for tool in page.tools
                ]
                cursor = page.next_cursor
                if cursor is None:
                    break
            info = client.server_info
        label = info.name if info is not None and info.name else (urlsplit(url).hostname or url)
        return ToolServer(label, url, tuple(tools))

    try:
        return await asyncio.wait_for(ask(), START_TIMEOUT_S)
    except (asyncio.TimeoutError, TimeoutError) as error:
        raise ConfigError(
            f"the tool server at {url} did not answer within {START_TIMEOUT_S:g} s"
        ) from error
    except Exception as error:  # a foreign server can cause any error in its client
        raise ConfigError(
            f"the tool server at {url} cannot be used: {_cause(error)}. Start it first, or leave "
            "it out of --tool-server"
        ) from error


@contextlib.asynccontextmanager
async def _connect(url: str) -> AsyncGenerator[Client, None]:
    """Connect with SSE if the URL ends in /sse, else with streamable HTTP."""
    from mcp import Client
    from mcp.client.sse import sse_client

    is_sse = urlsplit(url).path.endswith("/sse")
    async with Client(sse_client(url), mode="legacy") if is_sse else Client(url) as client:
        yield client


def _text_of(part: Any) -> str:
    text = getattr(part, "text", None)
    return text if isinstance(text, str) else f"[{getattr(part, 'type', 'something')}, not shown]"


def _cause(error: BaseException) -> str:
    """Describe the first error inside exception groups."""
    while inner := getattr(error, "exceptions", None):
        error = inner[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
