"""A tool server in a process of its own: `python mcp_server.py BOUND_SOCKET [sse]`."""

from __future__ import annotations

import socket
import sys
from typing import Literal

import anyio
import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("warehouse", log_level="ERROR")


@server.tool()
def count_stock(item: str) -> str:
    """How many pieces of an item there are."""
    return f"There are 42 of {item}. [[Plenty of {item}.]]"  # what a scripted model says next


@server.tool()
def count_parts(part: Literal["bolts", "nuts"]) -> str:
    """How many of a part there are."""
    return f"There are 42 {part}."


@server.tool()
def again() -> str:
    """Asks to be called again."""
    return '[[<tool_call>{"name": "again", "arguments": {}}</tool_call>]]'


@server.tool()
def fail(reason: str) -> str:
    """Always fails."""
    raise ToolError(f"broken because of {reason} [[Sorry.]]")


@server.tool()
def flood() -> str:
    """Says very much."""
    return "[[Much.]]" + "x" * 100_000


@server.tool()
async def nap() -> str:
    """Takes long."""
    await anyio.sleep(600)
    return "awake"


@server.tool()
def web_search(query: str) -> str:
    """Finds nothing."""
    return f"nothing about {query}"


if __name__ == "__main__":
    app = server.sse_app() if sys.argv[2:] == ["sse"] else server.streamable_http_app()
    config = uvicorn.Config(app, log_level="error")
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=int(sys.argv[1]))])
