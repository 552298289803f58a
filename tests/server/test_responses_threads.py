"""What is kept of large requests is written in threads: the event loop handles bytes alone."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from penstock.config import EngineConfig, ServerConfig
from penstock.server import errors
from penstock.server.middleware import BodyLimit, RequestContext
from penstock.server.responses import conversations, routes
from penstock.server.responses.desk import History, OwnedRun, ResponseDesk
from penstock.server.responses.items import Item
from penstock.server.responses.store import StoredItems
from penstock.server.service import LARGE_BODY_BYTES, Service, current_body_bytes

LARGE_TEXT = "x" * LARGE_BODY_BYTES


@pytest.fixture
def desk() -> Iterator[ResponseDesk]:
    nothing: Any = None  # neither engine nor tokenizer is asked
    service = Service(EngineConfig(), ServerConfig(), nothing, nothing)
    yield ResponseDesk(service)
    service.close()


def user(text: str) -> Item:
    return {"type": "message", "role": "user", "content": text}


@pytest.mark.parametrize("text", ["short", LARGE_TEXT])
def test_items_of_large_requests_are_written_in_a_thread(
    desk: ResponseDesk, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = FastAPI()
    app.state.service, app.state.responses = desk.service, desk
    app.include_router(conversations.router)
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
    desk: ResponseDesk, num_bytes: int
) -> None:
    async def run() -> FakeRun:
        current_body_bytes.set(num_bytes)
        fake: Any = FakeRun()
        written = await OwnedRun(desk, fake, "anna", History(), StoredItems()).whole()
        stored = await desk.response("anna", fake.id)
        assert stored is not None
        assert stored.response == written == json.dumps({"id": "resp_1", "output": []}).encode()
        made: FakeRun = fake
        return made

    (thread,) = asyncio.run(run()).threads
    assert (thread is threading.main_thread()) == (num_bytes == 0)


def test_what_is_continued_counts_as_a_part_of_the_request(desk: ResponseDesk) -> None:
    async def run() -> None:
        items = StoredItems.of([{**user(LARGE_TEXT), "id": "msg_1"}])
        made = await desk.conversations.create("anna", {}, items)
        body = routes.ResponseRequest.model_validate({"conversation": made.id})
        with pytest.raises(AttributeError):  # of a frontend that is not there
            await desk.prepare("anna", body, "m", "r")
        assert current_body_bytes.get() > LARGE_BODY_BYTES

    asyncio.run(run())
