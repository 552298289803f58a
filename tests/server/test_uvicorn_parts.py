"""What the server needs of uvicorn that is not its interface.

uvicorn has no hooks for errors of its HTTP parsers, slow clients or signals. Its version is
therefore fixed. Whoever raises it is told here what has changed.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import inspect
import re
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import uvicorn
from uvicorn.protocols.http import h11_impl, httptools_impl

PENSTOCK = Path(__file__).parents[2] / "penstock"
REMEDY = "change what needs it, then this list and the bound in pyproject.toml"
# By the part of uvicorn: who needs what of it.
METHODS: dict[Any, dict[str, str]] = {
    h11_impl.H11Protocol: {
        "send_400_response": "server/http/protocols.py",
        "_unsupported_upgrade_warning": "server/http/protocols.py",
        "connection_made": "server/http/protocols.py",
    },
    httptools_impl.HttpToolsProtocol: {
        "send_400_response": "server/http/httptools_protocol.py",
        "data_received": "server/http/httptools_protocol.py",
        "on_message_begin": "server/http/httptools_protocol.py",
        "on_header": "server/http/httptools_protocol.py",
        "on_headers_complete": "server/http/httptools_protocol.py",
        "on_body": "server/http/httptools_protocol.py",
        "on_message_complete": "server/http/httptools_protocol.py",
        "_should_upgrade": "server/http/httptools_protocol.py",
        "handle_websocket_upgrade": "server/http/httptools_protocol.py",
        "connection_made": "server/http/protocols.py",
    },
    uvicorn.Server: {"capture_signals": "server/serving.py", "startup": "server/serving.py"},
}
ATTRIBUTES = {  # of a protocol
    "transport": "server/http/connections.py",
    "flow": "server/http/connections.py",
    "cycle": "server/http/connections.py",
    "timeout_keep_alive_task": "server/http/connections.py",
    "connections": "server/http/protocols.py",
    "headers": "server/http/httptools_protocol.py",
    "scope": "server/http/httptools_protocol.py",
}
CYCLE_ATTRIBUTES = ("response_started", "response_complete", "more_body")
SERVER_ATTRIBUTES = ("server_state", "should_exit", "force_exit")
PROTOCOLS: list[Any] = [h11_impl.H11Protocol, httptools_impl.HttpToolsProtocol]


async def app(scope: Any, receive: Any, send: Any) -> None:
    pass


def test_the_version_is_fixed_to_the_one_that_is_tested() -> None:
    text = (PENSTOCK.parent / "pyproject.toml").read_text()
    (bound,) = re.findall(r'"uvicorn(.*?)"', text)
    installed = importlib.metadata.version("uvicorn")
    assert bound == f"=={installed}", (
        f"pyproject.toml asks for uvicorn{bound}, and {installed} is installed: the server stands "
        "on uvicorn's insides, and only the version that its tests run with may be used"
    )


@pytest.mark.parametrize(
    ("owner", "name", "needed_by"),
    [(owner, name, who) for owner, names in METHODS.items() for name, who in names.items()],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_methods_that_are_overridden_are_there(owner: Any, name: str, needed_by: str) -> None:
    found = inspect.getattr_static(owner, name, None)
    assert found is not None, f"{owner.__name__}.{name} is gone: {needed_by} needs it; {REMEDY}"
    assert name in (PENSTOCK / needed_by).read_text(), f"{needed_by} needs {name} no more"


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.__name__)
def test_attributes_that_are_read_are_there(protocol: Any) -> None:
    config = uvicorn.Config(app, ws="none", lifespan="off")
    server = uvicorn.Server(config)
    loop = asyncio.new_event_loop()
    try:
        made = protocol(config, server.server_state, {}, loop)
    finally:
        loop.close()
    for name, needed_by in ATTRIBUTES.items():
        assert hasattr(made, name), f"{protocol.__name__}.{name} is gone: {needed_by}; {REMEDY}"
    for name in SERVER_ATTRIBUTES:
        assert hasattr(server, name), f"Server.{name} is gone: server/serving.py; {REMEDY}"
    assert made.connections is server.server_state.connections, REMEDY
    assert hasattr(server.server_state, "default_headers"), f"server/serving.py; {REMEDY}"
    assert hasattr(server.config, "encoded_headers"), f"server/serving.py; {REMEDY}"
    assert made.tasks is server.server_state.tasks, f"server/run.py waits for them; {REMEDY}"


@pytest.mark.parametrize("module", [h11_impl, httptools_impl], ids=lambda module: module.__name__)
def test_requests_and_flow_control_tell_what_is_asked_of_them(module: Any) -> None:
    count = len(inspect.signature(module.RequestResponseCycle).parameters)
    cycle = module.RequestResponseCycle(*[MagicMock() for _ in range(count)])
    for name in CYCLE_ATTRIBUTES:
        assert isinstance(getattr(cycle, name, None), bool), (
            f"RequestResponseCycle.{name} is gone: server/http/connections.py needs it; {REMEDY}"
        )
    flow = module.FlowControl(MagicMock())
    assert flow.write_paused is False, f"FlowControl.write_paused is gone; {REMEDY}"


def test_nothing_private_of_starlette_or_fastapi_is_imported() -> None:
    pattern = re.compile(r"^\s*(?:from|import) +(?:starlette|fastapi)[\w.]*\._|import _", re.M)
    for path in (PENSTOCK / "server").rglob("*.py"):
        for line in path.read_text().splitlines():
            if "starlette" in line or "fastapi" in line:
                assert not pattern.search(line), f"{path}: {line.strip()}"
