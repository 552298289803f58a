"""Large bodies are read in threads, and are what they would have been."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.types import Message

from penstock.config import EngineConfig, ServerConfig
from penstock.protocol.errors import InputError
from penstock.server.app import ROUTERS
from penstock.server.http import bodies, errors
from penstock.server.http.bodies import (
    MAX_JSON_PARTS,
    MAX_JSON_VALUES,
    JsonRoute,
    num_parts,
    read_body,
)
from penstock.server.http.middleware import BodyLimit, RequestContext
from penstock.server.openai.protocol import CompletionRequest
from penstock.server.service import LARGE_BODY_BYTES, Service

FILLER = " " * LARGE_BODY_BYTES
JSON = {"Content-Type": "application/json"}


async def complete(body: CompletionRequest, request: Request) -> dict[str, Any]:
    return {"prompt": body.prompt, "extra": body.model_extra}


@pytest.fixture
def app() -> Iterator[FastAPI]:
    """A real route in front of nothing."""
    nothing: Any = None  # neither engine nor tokenizer is asked
    app = FastAPI()
    app.state.service = Service(EngineConfig(), ServerConfig(), nothing, nothing)
    app.router.add_api_route(
        "/complete", complete, methods=["POST"], response_model=None, route_class_override=JsonRoute
    )
    errors.install(app)
    app.add_middleware(BodyLimit, max_bytes=2**30)
    app.add_middleware(RequestContext)
    yield app
    app.state.service.close()


@asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


def post(app: FastAPI, content: str, headers: dict[str, str]) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client_of(app) as client:
            return await client.post("/complete", content=content, headers=headers)

    return asyncio.run(run())


@pytest.mark.parametrize("content_type", ["application/json", "text/plain", "application/x+json"])
@pytest.mark.parametrize(
    "content",
    [
        '{"prompt": [1, 2, 3], "more": {"a": [1.5, true, null, -7]}}',
        '{"prompt": ["a", 1]}',
        '{"prompt": "x", "temperature": "hot", "logit_bias": {"1": "a"}}',
        '{"prompt": "\\ud800"}',
        '{"prompt": "x", "seed": 1' + "0" * 5000 + "}",
        '{"prompt": "x", "temperature": NaN}',
        '{"prompt": }',
        "[1]",
        "[" * 20_000,
        '{"more": ' + "[" * 2000 + "]" * 2000 + "}",
        "{}",
    ],
    ids=lambda content: content[:40],
)
def test_a_large_body_is_answered_as_a_small_one_is(
    app: FastAPI, content: str, content_type: str
) -> None:
    headers = {"Content-Type": content_type, "X-Request-Id": "same"}
    small = post(app, content, headers)
    large = post(app, content + FILLER, headers)
    assert (small.status_code, small.json()) == (large.status_code, large.json())


def test_a_large_body_is_parsed_and_checked_while_others_are_answered(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    seen: list[str] = []

    def read_late(*arguments: Any) -> Any:
        assert release.wait(60)
        seen.append(threading.current_thread().name)
        return read_body(*arguments)

    monkeypatch.setattr(bodies, "read_body", read_late)

    async def run() -> None:
        async with client_of(app) as client:
            content = '{"prompt": "large"}' + FILLER
            large = [
                asyncio.ensure_future(client.post("/complete", content=content, headers=JSON))
                for _ in range(5)
            ]
            await asyncio.sleep(0)  # so that they come first
            small = await client.post("/complete", json={"prompt": "small"})
            assert small.json()["prompt"] == "small"
            assert not any(task.done() for task in large)
            release.set()
            answers = await asyncio.gather(*large)
            assert [answer.json()["prompt"] for answer in answers] == ["large"] * 5

    try:
        asyncio.run(run())
    finally:
        release.set()
    assert len(seen) == 5
    assert all(name.startswith("large") for name in seen)


def test_a_body_of_a_client_that_left_is_not_read(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    statuses: list[int] = []
    content = ('{"prompt": "large"}' + FILLER).encode()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/complete",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    monkeypatch.setattr(bodies, "read_body", lambda *_: release.wait(60))

    async def run() -> None:
        messages: list[Message] = [
            {"type": "http.request", "body": content, "more_body": False},
            {"type": "http.disconnect"},
        ]

        async def receive() -> Message:
            return messages.pop(0)

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        await app(dict(scope), receive, send)

    try:
        asyncio.run(run())
    finally:
        release.set()
    assert statuses == [499]


@pytest.mark.parametrize("part", ["[],", "{},", '{"a":{"a":[]}},', '"a":1,'])
def test_more_parts_than_anyone_needs_are_refused_unparsed(
    app: FastAPI, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(json, "loads")
    with pytest.raises(InputError, match="at most 524288 objects, lists and fields"):
        read_body(
            CompletionRequest,
            bytearray(b'{"prompt": [' + part.encode() * (MAX_JSON_PARTS + 1)),
        )


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32-le"])
def test_parts_are_counted_whatever_the_encoding(encoding: str) -> None:
    """An escaped quotation mark would turn texts and what is between them around, if misread."""
    parts = '{"prompt": "\\"", "more": [' + "[]," * MAX_JSON_PARTS + "1]}"
    with pytest.raises(InputError, match="at most 524288"):
        read_body(CompletionRequest, bytearray(parts.encode(encoding)))
    made = read_body(CompletionRequest, bytearray('{"prompt": "\\""}'.encode(encoding)))
    assert isinstance(made, CompletionRequest)
    assert made.prompt == '"'


def test_the_client_is_told_that_there_are_too_many_parts(app: FastAPI) -> None:
    answer = post(app, '{"prompt": "x", "more": [' + "[]," * MAX_JSON_PARTS + "1]}", JSON)
    assert answer.status_code == 400
    assert "at most 524288 objects" in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "BadRequestError"


def test_more_token_ids_than_any_context_holds_are_refused_unparsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(json, "loads")
    body = bytearray(b'{"prompt": [' + b"1," * (MAX_JSON_VALUES + 2) + b"1]}")
    with pytest.raises(InputError, match=f"at most {MAX_JSON_VALUES} values, such as token ids"):
        read_body(CompletionRequest, body)


def test_brackets_and_colons_within_texts_do_not_count() -> None:
    text = '{"a": ["' * 300_000 + '\\"' * 5 + "," * MAX_JSON_VALUES
    body = bytearray(json.dumps({"prompt": [text, text], "n": 1}).encode())
    assert num_parts(body.decode()) == 4
    made = read_body(CompletionRequest, body)
    assert isinstance(made, CompletionRequest)
    assert made.prompt == [text, text]


def test_a_million_token_ids_and_an_image_of_20_mb_are_taken() -> None:
    body = json.dumps({"prompt": list(range(2**20)), "image": "data:," + "A" * 20_000_000})
    made = read_body(CompletionRequest, bytearray(body.encode()))
    assert isinstance(made, CompletionRequest)
    assert made.prompt == list(range(2**20))


def test_every_route_that_takes_a_body_reads_large_ones_so() -> None:
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    with_body = [route for route in routes if route.body_field is not None]
    assert with_body
    assert all(isinstance(route, JsonRoute) for route in with_body)
