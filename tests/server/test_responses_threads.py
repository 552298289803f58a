"""What is kept of large requests is written in threads: the event loop handles bytes alone."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI

from penstock.config import EngineConfig, ServerConfig
from penstock.server.http import errors
from penstock.server.http.middleware import BodyLimit, RequestContext
from penstock.server.responses import conversations, routes
from penstock.server.responses.items import Item
from penstock.server.responses.runner import History, OwnedRun, ResponseRunner
from penstock.server.responses.store import MemoryStore, StoredItems, StoreLimits, memory_store
from penstock.server.service import LARGE_BODY_BYTES, Service, current_body_bytes

LARGE_TEXT = "x" * LARGE_BODY_BYTES


@pytest.fixture
def runner() -> Iterator[ResponseRunner]:
    nothing: Any = None  # neither engine nor tokenizer is asked
    service = Service(EngineConfig(), ServerConfig(), nothing, nothing)
    yield ResponseRunner(service, memory_store(service.server_config))
    service.close()


def user(text: str) -> Item:
    return {"type": "message", "role": "user", "content": text}


@pytest.mark.parametrize("text", ["short", LARGE_TEXT])
def test_items_of_large_requests_are_written_in_a_thread(
    runner: ResponseRunner, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = app_of(runner, conversations.router)
    errors.install(app)
    app.add_middleware(BodyLimit, max_bytes=2**30)
    app.add_middleware(RequestContext)
    threads: list[threading.Thread] = []
    write: Callable[..., StoredItems] = StoredItems.of

    def watched(*args: Any, **kwargs: Any) -> StoredItems:
        threads.append(threading.current_thread())
        return write(*args, **kwargs)

    monkeypatch.setattr(StoredItems, "of", watched)

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            made = await client.post("/v1/conversations", json={"items": [user(text)]})
            path = f"/v1/conversations/{made.json()['id']}/items"
            await client.post(path, json={"items": [user(text)]})
            return await client.get(path)

    listed = asyncio.run(run()).json()["data"]
    assert [item["content"][0]["text"] for item in listed] == [text, text]
    assert len(threads) == 2
    for thread in threads:
        assert (thread is threading.main_thread()) == (text == "short")


class FakeRun:
    """A response that has ended."""

    id, status, is_background, is_stored = "resp_1", "completed", False, True
    output: list[Item] = []

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def snapshot(self) -> dict[str, Any]:
        self.threads.append(threading.current_thread())
        return {"id": self.id, "output": self.output}

    async def steps(self) -> Any:
        return
        yield


@pytest.mark.parametrize("num_bytes", [0, LARGE_BODY_BYTES + 1])
def test_a_response_to_a_large_request_is_written_once_in_a_thread(
    runner: ResponseRunner, num_bytes: int
) -> None:
    async def run() -> FakeRun:
        current_body_bytes.set(num_bytes)
        fake: Any = FakeRun()
        written = await OwnedRun(runner, fake, "anna", History(), StoredItems()).whole()
        stored = await runner.find("anna", fake.id)
        assert stored is not None
        assert stored.response == written == json.dumps({"id": "resp_1", "output": []}).encode()
        made: FakeRun = fake
        return made

    (thread,) = asyncio.run(run()).threads
    assert (thread is threading.main_thread()) == (num_bytes == 0)


def app_of(runner: ResponseRunner, router: APIRouter) -> FastAPI:
    app = FastAPI()
    app.state.service, app.state.responses = runner.service, runner
    app.include_router(router)
    return app


def test_what_is_continued_counts_as_a_part_of_the_request(runner: ResponseRunner) -> None:
    async def run() -> None:
        items = StoredItems.of([{**user(LARGE_TEXT), "id": "msg_1"}])
        made = await runner.conversations.create("anna", {}, items)
        body = routes.ResponseRequest.model_validate({"conversation": made.id})
        assert (await runner.history("anna", body)).items == items
        assert current_body_bytes.get() > LARGE_BODY_BYTES

    asyncio.run(run())


def test_of_a_client_that_left_nothing_more_is_prepared(
    runner: ResponseRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = app_of(runner, routes.router)
    app.add_middleware(RequestContext)
    preparing, ended, sent = asyncio.Event(), asyncio.Event(), []

    async def prepare(*_: Any) -> None:
        preparing.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def admit(model: str | None) -> str:
        return "model"

    async def receive() -> dict[str, Any]:
        if not preparing.is_set():
            return {"type": "http.request", "body": b'{"input": "Hi"}', "more_body": False}
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    monkeypatch.setattr(runner, "prepare", prepare)
    monkeypatch.setattr(runner.service, "admit", admit)
    headers = [(b"content-type", b"application/json")]
    scope = {
        "type": "http", "method": "POST", "path": "/v1/responses", "headers": headers,
        "query_string": b"",
    }  # fmt: skip
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 60))
    assert ended.is_set()
    assert sent[0]["status"] == 499


class SlowToWrite(FakeRun):
    """A response in the background, whose end takes long to write."""

    is_background = True

    def __init__(self, ends: bool) -> None:
        super().__init__()
        self.status = "queued"
        self._ends = ends
        self.is_writing, self.may_write = threading.Event(), threading.Event()

    def snapshot(self) -> dict[str, Any]:
        if self.status != "queued":
            self.is_writing.set()
            self.may_write.wait()
        return {"id": self.id}

    async def steps(self) -> Any:
        if not self._ends:
            await asyncio.Event().wait()
        self.status = "completed"
        return
        yield

    def cancel(self) -> None:
        self.status = "cancelled"


@pytest.mark.parametrize(("ends", "status"), [(True, "completed"), (False, "cancelled")])
def test_how_a_response_ended_is_kept_however_often_it_is_cancelled(
    runner: ResponseRunner, ends: bool, status: str
) -> None:
    slow: Any = SlowToWrite(ends)

    async def run() -> None:
        current_body_bytes.set(LARGE_BODY_BYTES + 1)
        await runner.start(OwnedRun(runner, slow, "anna", History(), StoredItems()))
        stops = [] if ends else [asyncio.ensure_future(runner.stop("anna", slow.id))]
        await asyncio.to_thread(slow.is_writing.wait)
        stops += [asyncio.ensure_future(runner.stop("anna", slow.id)) for _ in range(2)]
        await asyncio.wait(stops, timeout=0)  # they have begun
        slow.may_write.set()
        await asyncio.gather(*stops)
        stored = await runner.find("anna", slow.id)
        assert stored is not None
        assert stored.status == status

    try:
        asyncio.run(run())
    finally:
        slow.may_write.set()


def test_a_response_that_has_become_too_large_to_keep_does_not_seem_to_run_on(
    runner: ResponseRunner,
) -> None:
    store = MemoryStore(StoreLimits(10, max_bytes=999, max_bytes_per_owner=999, max_items=10))
    runner = ResponseRunner(runner.service, store)

    async def run() -> None:
        fake: Any = FakeRun()
        owned = OwnedRun(runner, fake, "anna", History(), StoredItems())
        fake.status = "in_progress"
        await owned.save()
        assert await runner.find("anna", fake.id) is not None
        fake.status, fake.output = "completed", [{**user("x" * 999), "id": "msg_1"}]
        await owned.save()
        assert await runner.find("anna", fake.id) is None

    asyncio.run(run())


def test_items_that_come_at_once_have_ids_of_their_own(
    runner: ResponseRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests read the conversation before either adds to it."""
    app = app_of(runner, conversations.router)
    find, both_have_read = runner.conversations.find, asyncio.Event()
    num_reads = 0

    async def find_together(owner: str, conversation_id: str) -> Any:
        nonlocal num_reads
        found = await find(owner, conversation_id)
        num_reads += 1
        if num_reads == 2:
            both_have_read.set()
        await both_have_read.wait()
        return found

    async def run() -> tuple[list[httpx.Response], StoredItems]:
        made = await runner.conversations.create("", {}, StoredItems())
        monkeypatch.setattr(runner.conversations, "find", find_together)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"items": [user("x") | {"id": "same"}]}
            posts = [client.post(f"/v1/conversations/{made.id}/items", json=body) for _ in "ab"]
            answers = await asyncio.gather(*posts)
        found = await find("", made.id)
        assert found is not None
        return answers, found.items

    answers, kept = asyncio.run(run())
    told = [answer.json()["data"][0]["id"] for answer in answers]
    assert len(set(told)) == 2
    assert "same" in told
    assert sorted(kept.ids) == sorted(told)
    assert [item["id"] for item in kept.read()] == list(kept.ids)
