"""What the endpoints share: where responses are kept, and those that run in the background."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from penstock.protocol.errors import InputError
from penstock.server.responses.convert import check_body, offer_tools, prepare, turn_request
from penstock.server.responses.items import Item, input_items
from penstock.server.responses.protocol import ResponseRequest
from penstock.server.responses.run import Job, ResponseRun, encode
from penstock.server.responses.store import MemoryStore, ResponseStore, StoredResponse
from penstock.server.responses.tool_servers import ToolServers
from penstock.server.service import Service


class ResponseDesk:
    """One for each app. Whatever it is asked for belongs to an owner, the key that is sent.

    Where anyone may use the API, all are one.
    """

    def __init__(self, service: Service, store: ResponseStore | None = None) -> None:
        config = service.server_config
        self._service = service
        self._tool_servers = service.tool_servers or ToolServers([], 0, 0)
        self.store = store or MemoryStore(
            config.max_stored_responses, config.max_stored_response_bytes
        )
        self._background: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def prepare(
        self, owner: str, body: ResponseRequest, model: str, request_id: str
    ) -> OwnedRun:
        """Check a request, and make it ready to run; InputError says what is wrong with it."""
        in_thread = self._service.in_thread  # a body may hold a great deal to look at
        await in_thread(check_body, body)
        offered = await in_thread(offer_tools, body, self._tool_servers)
        history = await self._history(owner, body.previous_response_id)
        items = [*history, *await in_thread(input_items, body)]
        request = await in_thread(turn_request, self._service, body, items, offered)
        turn, request = await in_thread(
            prepare, self._service, request, request_id, body.truncation == "auto"
        )
        job = Job(body, model, items, offered, turn, request)
        run = ResponseRun(self._service, self._tool_servers, job, request_id)
        return OwnedRun(run, owner, items, self.store if body.store is not False else None)

    async def _history(self, owner: str, response_id: str | None) -> list[Item]:
        if response_id is None:
            return []
        stored = await self.store.get(owner, response_id)
        if stored is None:
            raise InputError(
                f"there is no response {response_id!r}: it was not stored, was deleted, or made "
                "room for newer ones; send its conversation as input",
                "previous_response_id",
            )
        response = stored.read()
        if response["status"] == "in_progress":
            raise InputError(
                f"response {response_id!r} is still in progress: wait until it is completed",
                "previous_response_id",
            )
        return [*stored.read_input(), *response["output"]]

    async def start(self, owned: OwnedRun) -> dict[str, Any]:
        """Run in the background; the response as it is at first."""
        await owned.save()
        key = (owned.owner, owned.run.id)
        task = asyncio.ensure_future(owned.run_to_end())
        self._background[key] = task
        task.add_done_callback(lambda _: self._background.pop(key, None))
        return owned.run.snapshot()

    async def stop(self, owner: str, response_id: str) -> None:
        """End a response that runs in the background, if it does."""
        task = self._background.get((owner, response_id))
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class OwnedRun:
    """A run whose end is kept for its owner, unless `store` is None."""

    def __init__(
        self, run: ResponseRun, owner: str, items: list[Item], store: ResponseStore | None
    ) -> None:
        self.run = run
        self.owner = owner
        self._items = items
        self._store = store

    async def save(self) -> None:
        if self._store is not None:
            stored = StoredResponse.of(self.run.snapshot(), self._items)
            await self._store.put(self.owner, stored)

    async def whole(self) -> dict[str, Any]:
        await self.run.whole()
        await self.save()
        return self.run.snapshot()

    async def events(self) -> AsyncGenerator[str, None]:
        """Events as JSON. The response is kept before the client hears that it has ended."""
        async with contextlib.aclosing(self.run.events()) as events:
            async for event in events:
                if event.get("response", {}).get("status", "in_progress") != "in_progress":
                    await self.save()
                yield encode(event)

    async def run_to_end(self) -> None:
        """In the background, where nobody is there to be told of errors."""
        try:
            await self.run.whole()
        except asyncio.CancelledError:
            self.run.cancel()
            raise
        except Exception as error:
            self.run.fail(error)
        finally:
            await self.save()
