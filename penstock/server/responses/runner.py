"""ResponseRunner: prepares, runs and stores responses, and cancels background ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

from penstock.conversation.prepare import tokenize_turn
from penstock.protocol.errors import InputError
from penstock.server.adapters.holds import held_for_longer
from penstock.server.http.errors import NotFound
from penstock.server.responses.conversations import Conversations
from penstock.server.responses.convert import (
    check_body,
    offer_tools,
    plain_json,
    prepare,
    renamed_fields,
    turn_request,
)
from penstock.server.responses.items import input_items
from penstock.server.responses.protocol import ResponseRequest
from penstock.server.responses.run import ResponseJob, ResponseRun, encode, is_open
from penstock.server.responses.store import (
    ResponseStore,
    StoredItems,
    StoredResponse,
)
from penstock.server.responses.tool_servers import ToolServers
from penstock.server.service import Service, current_body_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class History:
    """What a request continues: the earlier items, and their conversation if there is one."""

    items: StoredItems = StoredItems()
    conversation_id: str | None = None


class ResponseRunner:
    """There is one per app. Every response belongs to an owner: the API key of its request.

    Without API keys, all requests have the same owner.
    """

    def __init__(
        self,
        service: Service,
        store: ResponseStore,
        stop_elsewhere: Callable[[str, str], Awaitable[None]] | None = None,
    ) -> None:
        """`stop_elsewhere` cancels what another API process runs, if there are others."""
        self.service = service
        self._tool_servers = service.tool_servers or ToolServers([], 0, 0)
        self.store = store
        self._stop_elsewhere = stop_elsewhere
        self.conversations = Conversations(self.store)
        self._background: dict[tuple[str, str], tuple[OwnedRun, asyncio.Task[None]]] = {}

    async def prepare(
        self, owner: str, body: ResponseRequest, model: str, request_id: str, history: History
    ) -> OwnedRun:
        """Prepare a request. Raises InputError."""
        return await self.service.in_thread(self._prepare, owner, body, model, request_id, history)

    def _prepare(
        self, owner: str, body: ResponseRequest, model: str, request_id: str, history: History
    ) -> OwnedRun:
        service = self.service
        offered = offer_tools(body, self._tool_servers)
        new = input_items(body.input, history.items.ids)
        with plain_json("input"):
            added = StoredItems.of(new, allow_nan=False)
        items = [*history.items.read(), *new]
        is_stored = self._is_stored(body, history, added)
        request = turn_request(service, body, items, offered)
        turn, request = prepare(service, request, request_id, body.truncation == "auto")
        job = ResponseJob(
            body, model, items, offered, turn, request, history.conversation_id, is_stored
        )
        run = ResponseRun(service, self._tool_servers, job, request_id)
        return OwnedRun(self, run, owner, history, added)

    async def count(self, owner: str, body: ResponseRequest) -> int:
        """Count the input tokens of a request."""
        service = self.service
        history = await self.history(owner, body)

        def count() -> int:
            offered = offer_tools(body, self._tool_servers)
            items = [*history.items.read(), *input_items(body.input)]
            with renamed_fields():
                request = turn_request(service, body, items, offered)
                return len(tokenize_turn(service.frontend, request, service.max_counted_tokens))

        return await service.in_thread(count)

    async def history(self, owner: str, body: ResponseRequest) -> History:
        """Check a request. Returns what it continues, which counts toward the request's size."""
        await self.service.in_thread(check_body, body)  # it may be large
        history = History()
        if body.conversation is not None:
            given = body.conversation
            conversation_id = given if isinstance(given, str) else given.id
            try:
                found = await self.conversations.find(owner, conversation_id)
            except NotFound as error:
                message = f"{error}; create one at /v1/conversations"
                raise InputError(message, "conversation") from error
            history = History(found.items, conversation_id)
        elif body.previous_response_id is not None:
            history = History(await self._items_before(owner, body.previous_response_id))
        current_body_bytes.set(current_body_bytes.get() + history.items.num_bytes)
        return history

    async def _items_before(self, owner: str, response_id: str) -> StoredItems:
        try:
            stored = await self.response(owner, response_id)
        except NotFound as error:
            message = f"{error}; send its conversation as input"
            raise InputError(message, "previous_response_id") from error
        if is_open(stored.status):
            raise InputError(
                f"response {response_id!r} is still {stored.status.replace('_', ' ')}: wait until "
                "it is completed",
                "previous_response_id",
            )
        return stored.input + stored.output

    def _is_stored(self, body: ResponseRequest, history: History, added: StoredItems) -> bool:
        """Whether to store the response. Raises InputError if it must be stored but cannot."""
        items = history.items + added
        refusal = self.store.refusal(items.num_bytes, len(items))
        if refusal is None:
            return body.store is not False
        if history.conversation_id is not None:
            raise InputError(f"the conversation cannot grow further: {refusal}", "conversation")
        if body.store or body.background:
            name = "store" if body.store else "background"
            raise InputError(f"{name}: this response cannot be kept: {refusal}", name)
        return False

    async def find(self, owner: str, response_id: str) -> StoredResponse | None:
        stored = await self.store.get(owner, response_id)
        return stored if isinstance(stored, StoredResponse) else None

    async def response(self, owner: str, response_id: str) -> StoredResponse:
        """Return a stored response. Raises NotFound."""
        stored = await self.find(owner, response_id)
        if stored is None:
            raise NotFound(
                f"there is no response {response_id!r:.100}: it was not stored, was deleted or "
                "was evicted",
                "response_id",
            )
        return stored

    async def start(self, owned: OwnedRun) -> bytes:
        """Run a response in the background. Returns its initial state."""
        queued = await owned.save()
        if await self.find(owned.owner, owned.run.id) is None:
            raise InputError(
                "background: this response cannot be kept, it repeats too much of the request",
                "background",
            )
        key = (owned.owner, owned.run.id)
        with held_for_longer() as hold:
            task = asyncio.ensure_future(owned.run_to_end())
        self._background[key] = owned, task
        task.add_done_callback(lambda _: self._background.pop(key, None))
        task.add_done_callback(lambda _: hold.release())
        return queued

    async def stop(self, owner: str, response_id: str) -> None:
        """Cancel a response if it runs in the background."""
        if (owner, response_id) in self._background:
            await self.stop_here(owner, response_id)
        elif self._stop_elsewhere is not None:
            await self._stop_elsewhere(owner, response_id)

    async def stop_here(self, owner: str, response_id: str) -> None:
        """Cancel a response if it runs in the background of this process."""
        owned, task = self._background.get((owner, response_id), (None, None))
        if owned is None or task is None:
            return
        if is_open(owned.run.status):  # otherwise it is about to be stored
            task.cancel()
        await asyncio.wait({task})


@dataclass(frozen=True)
class OwnedRun:
    """A run whose result is stored for its owner and added to its conversation."""

    runner: ResponseRunner
    run: ResponseRun
    owner: str
    history: History
    added: StoredItems  # the request's own items

    async def whole(self) -> bytes:
        """Run to the end and return the response as JSON. Raises the error if it fails."""
        async with contextlib.aclosing(self.run.steps()) as steps:
            async for _ in steps:
                pass
        return await self._finish()

    async def events(self) -> AsyncGenerator[str, None]:
        """Stream events as JSON. The response is stored before its last event is sent."""
        async with contextlib.aclosing(self.run.events()) as events:
            async for event in events:
                if "response" not in event:
                    yield encode(event)
                    continue
                if not is_open(event["response"]["status"]):
                    await self._finish()
                yield await self.runner.service.in_thread_if_large(encode, event)

    async def run_to_end(self) -> None:
        """Run in the background. Errors are stored in the response, not raised."""
        try:
            async with contextlib.aclosing(self.run.steps()) as steps:
                async for event in steps:
                    if event["type"] == "response.in_progress":
                        await self.save()
        except asyncio.CancelledError:
            self.run.cancel()
            raise
        except Exception as error:
            self.run.fail(error)
        finally:
            await self._finish()

    async def save(self) -> bytes:
        """Store the current state if the response is stored. Returns it as JSON."""
        run, items = self.run, self.history.items + self.added

        def write() -> StoredResponse:
            return StoredResponse(
                id=run.id,
                status=run.status,
                is_background=run.is_background,
                response=encode(run.snapshot()).encode(),
                input=items,
                output=StoredItems.of(run.output),
            )

        stored = await self.runner.service.in_thread_if_large(write)
        if run.is_stored and not await self.runner.store.put(self.owner, stored):
            await self.runner.store.delete(self.owner, run.id)  # else it would stay in progress
        return stored.response

    async def _finish(self) -> bytes:
        conversation_id = self.history.conversation_id
        if conversation_id is not None and self.run.status in ("completed", "incomplete"):
            said = self.added + StoredItems.of(self.run.output)
            try:
                await self.runner.conversations.add(self.owner, conversation_id, said)
            except NotFound:
                pass  # it was deleted meanwhile
            except InputError as error:  # the answer made it too large; the response is still sent
                logger.warning("Response %s is not in its conversation: %s", self.run.id, error)
        return await self.save()
