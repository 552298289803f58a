"""Servers in processes of their own: one with the real default model, others with a tiny one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
from scripted import make_scripted_model
from server_process import DUMMY, ServerProcess, make_tiny_model, start_scripted

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="session")
def server(default_model: str) -> Iterator[ServerProcess]:
    """The real default model behind the API, with room for prompts of 2048 tokens."""
    with ServerProcess(
        default_model,
        *("--cpu-threads", "1", "--kv-cache-memory-bytes", "512MiB", "--max-model-len", "2048"),
        "--no-spare-engine",
    ) as process:
        yield process


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@contextlib.contextmanager
def starting(model: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers of the model with random weights; ends them all."""
    with contextlib.ExitStack() as stack:

        def start(*flags: str, **options: Any) -> ServerProcess:
            return stack.enter_context(ServerProcess(str(model), *DUMMY, *flags, **options))

        yield start


@pytest.fixture
def serve_tiny(tiny_model: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers with a tiny model, which end with the test."""
    with starting(tiny_model) as start:
        yield start


@pytest.fixture(scope="module")
def serve_module(tiny_model: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers with a tiny model, which end with the file."""
    with starting(tiny_model) as start:
        yield start


@pytest.fixture(scope="session")
def scripted_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A model that says what the conversation tells it to; its template shows its parsers."""
    folder = make_scripted_model(tmp_path_factory.mktemp("scripted"))
    with start_scripted(folder) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    """OpenAI's own client of the default model."""
    with server.openai() as client:
        yield client


@pytest.fixture(scope="module")
def scripted(scripted_server: ServerProcess) -> Iterator[openai.OpenAI]:
    """OpenAI's own client of the model that says what it is told."""
    with scripted_server.openai() as client:
        yield client


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from page_actions import a_browser  # only the tests of pages need playwright

    with a_browser() as launched:
        yield launched


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    from page_actions import pages_of

    with pages_of(browser) as open_at:
        yield open_at
