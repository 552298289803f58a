"""Servers in processes of their own: one with the real default model, others with a tiny one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess, make_tiny_model

SMALL = ("--cpu-threads", "1", "--kv-cache-memory-bytes", "512MiB")


@pytest.fixture(scope="session")
def server(default_model: str) -> Iterator[ServerProcess]:
    """The real default model behind the API, with room for prompts of 2048 tokens."""
    process = ServerProcess(default_model, *SMALL, "--max-model-len", "2048")
    yield process
    process.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def serve_tiny(tiny_model: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers with a tiny model of random weights; ends them all."""
    processes: list[ServerProcess] = []

    def start(*flags: str, **options: Any) -> ServerProcess:
        tiny = ("--load-format", "dummy", "--kv-cache-memory-bytes", "64MiB", "--cpu-threads", "1")
        processes.append(ServerProcess(str(tiny_model), *tiny, *flags, **options))
        return processes[-1]

    yield start
    for process in processes:
        process.close()
