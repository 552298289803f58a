"""What a server connects to beside its engines: a collector of traces, and tool servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.config import ServerConfig

if TYPE_CHECKING:
    from penstock.server.operations.tracing import Tracing
    from penstock.server.responses.tool_servers import ToolServers


async def connect_outside(config: ServerConfig) -> tuple[Tracing | None, ToolServers | None]:
    """Connect to those that are configured. Raises `ConfigError`."""
    tracing = tool_servers = None
    if config.otlp_traces_endpoint is not None:
        from penstock.server.operations.tracing import connect_collector

        tracing = connect_collector(config.otlp_traces_endpoint)
    if config.tool_server:
        from penstock.server.responses.tool_servers import connect_tool_servers

        tool_servers = await connect_tool_servers(config)
    return tracing, tool_servers
