"""Work on text never holds up those who ask for little."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config import EngineConfig, ServerConfig
from penstock.confined.scope import need_turn, waiting
from penstock.server.http.access import current_tenant
from penstock.server.http.middleware import BodyLimit
from penstock.server.openai import chat_batch
from penstock.server.service import (
    LARGE_BODY_BYTES,
    NUM_TURNS,
    Service,
    current_body_bytes,
)


async def handle(size: int, work: Any, service: Service) -> Any:
    """As the app does: a body is read, and then worked on."""
    answer: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        answer.append(await service.in_thread(work))

    async def receive() -> dict[str, Any]:
        nonlocal size
        part = min(size, 100_000)
        size -= part
        return {"type": "http.request", "body": bytes(part), "more_body": size > 0}

    scope = {"type": "http", "headers": [], "state": {}}
    await BodyLimit(app, max_bytes=2**30)(scope, receive, app)  # type: ignore[arg-type]
    return answer[0]


@pytest.fixture
def service() -> Any:
    nothing: Any = None  # neither engine nor tokenizer is asked
    made = Service(EngineConfig(), ServerConfig(), nothing, nothing)
    yield made
    made.close()


def test_small_requests_do_not_wait_for_large_ones(service: Service) -> None:
    release = threading.Event()

    async def run() -> None:
        large = [
            asyncio.ensure_future(handle(LARGE_BODY_BYTES + 1, release.wait, service))
            for _ in range(50)
        ]
        await asyncio.sleep(0)  # so that they come first
        assert await asyncio.wait_for(handle(10, lambda: 7, service), 120) == 7
        assert not any(task.done() for task in large)
        release.set()
        assert all(await asyncio.gather(*large))

    try:
        asyncio.run(run())
    finally:
        release.set()
    assert current_body_bytes.get() == 0


@pytest.mark.parametrize("size", [10, LARGE_BODY_BYTES + 1])
def test_text_and_other_tenants_do_not_wait_for_media(service: Service, size: int) -> None:
    """However many items a tenant sends, none is refused."""
    release, done = threading.Event(), list[None]()

    def prepare() -> str:
        need_turn()
        with waiting(Future[None]()):  # as for a process or another server
            assert release.wait(120)
        done.append(None)
        return threading.current_thread().name

    async def run() -> None:
        count = 5 * NUM_TURNS + 10
        media = [asyncio.ensure_future(handle(size, prepare, service)) for _ in range(count)]
        while service._turns.get("") is None or not service._turns[""].locked():
            await asyncio.sleep(0)
        assert await asyncio.wait_for(handle(size, lambda: 7, service), 120) == 7
        token = current_tenant.set("other")
        other = asyncio.ensure_future(handle(size, lambda: need_turn() or 8, service))
        current_tenant.reset(token)
        assert await asyncio.wait_for(other, 120) == 8
        assert len(service._waiting_threads._threads) <= NUM_TURNS + 1
        for task in media[-5:]:  # their clients leave
            task.cancel()
        release.set()
        names = await asyncio.gather(*media[:-5])
        assert all(name.startswith("wait") for name in names)
        assert len(done) == len(names)

    try:
        asyncio.run(run())
    finally:
        release.set()
    gc.collect()  # tracebacks of those who left
    assert not service._turns, "nothing is left of tenants"


def test_of_a_batch_nothing_more_is_prepared_once_its_client_has_left(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, release = threading.Event(), threading.Event()
    prepared: list[Any] = []

    def prepare(_: Service, body: Any, request_id: str) -> Any:
        prepared.append(body)
        if len(prepared) == 2:
            begun.set()
            release.wait()
        return SimpleNamespace(check_weight=lambda num, field: None)

    monkeypatch.setattr(chat_batch, "prepare_chat", prepare)
    bodies: Any = ["first", "second", "third"]

    async def run() -> None:
        preparing = asyncio.ensure_future(chat_batch._prepare_all(service, bodies, "r"))
        await asyncio.to_thread(begun.wait)
        preparing.cancel()
        await asyncio.gather(preparing, return_exceptions=True)

    try:
        asyncio.run(run())
    finally:
        release.set()
    service.close()
    service._threads.shutdown(wait=True)
    assert prepared == ["first", "second"]
