"""/v1/conversations: stores the items of conversations. Responses append to them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from pydantic import Field

from penstock.protocol.errors import InputError
from penstock.server.http.access import current_tenant
from penstock.server.http.bodies import JsonRoute
from penstock.server.http.errors import NotFound, describe_errors
from penstock.server.http.replies import json_response
from penstock.server.responses.convert import plain_json
from penstock.server.responses.items import input_items, new_id
from penstock.server.responses.protocol import (
    InputItem,
    ItemList,
    MetadataKey,
    MetadataValue,
)
from penstock.server.responses.store import Page, ResponseStore, StoredConversation, StoredItems
from penstock.server.schema.base import Body, Entries, Items, Reply
from penstock.server.service import Service

router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)

ERRORS = describe_errors(400, 401, 404, 413, 500)
Metadata = Annotated[Entries[MetadataKey, MetadataValue], Field(max_length=16)]


class Conversations:
    """The conversations in a store. Changes are serialized, so that none is lost."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def create(
        self, owner: str, metadata: dict[str, str], items: StoredItems
    ) -> StoredConversation:
        made = StoredConversation(new_id("conv"), int(time.time()), metadata, items)
        await self._put(owner, made)
        return made

    async def find(self, owner: str, conversation_id: str) -> StoredConversation:
        """Return a conversation. Raises NotFound."""
        found = await self._store.get(owner, conversation_id)
        if not isinstance(found, StoredConversation):
            raise NotFound(
                f"there is no conversation {conversation_id!r:.100}: it was deleted or evicted",
                "conversation_id",
            )
        return found

    async def change(
        self,
        owner: str,
        conversation_id: str,
        change: Callable[[StoredConversation], StoredConversation],
    ) -> StoredConversation:
        """Apply a change and return the result. Raises NotFound, or InputError if too large."""
        async with self._store.changing():
            changed = change(await self.find(owner, conversation_id))
            await self._put(owner, changed)
            return changed

    async def add(self, owner: str, conversation_id: str, items: StoredItems) -> StoredItems:
        """Append items. Returns them with unique ids. Raises the same errors as `change`."""
        added = items

        def append(found: StoredConversation) -> StoredConversation:
            nonlocal added
            added = items.apart_from(found.items.ids)
            return replace(found, items=found.items + added)

        await self.change(owner, conversation_id, append)
        return added

    async def delete(self, owner: str, conversation_id: str) -> None:
        async with self._store.changing():
            await self.find(owner, conversation_id)
            await self._store.delete(owner, conversation_id)

    async def _put(self, owner: str, conversation: StoredConversation) -> None:
        if not await self._store.put(owner, conversation):
            refusal = self._store.refusal(conversation.num_bytes, conversation.num_items)
            raise InputError(f"the conversation cannot be kept: {refusal}", "items")


# -- bodies and replies


class CreateConversation(Body):
    items: Items[InputItem] | None = Field(None, description="Initial items.")
    metadata: Metadata | None = None


class UpdateConversation(Body):
    metadata: Metadata = Field(description="Replaces the metadata.")


class CreateItems(Body):
    items: Items[InputItem]


class ConversationReply(Reply):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(Reply):
    id: str
    object: Literal["conversation.deleted"]
    deleted: Literal[True]


def _reply(conversation: StoredConversation) -> ConversationReply:
    return ConversationReply(
        id=conversation.id,
        object="conversation",
        created_at=conversation.created_at,
        metadata=conversation.metadata,
    )


# -- routes


@router.post("/v1/conversations", responses=ERRORS)
async def create_conversation(body: CreateConversation, request: Request) -> ConversationReply:
    """Create a conversation."""
    conversations = _conversations(request)
    service: Service = request.app.state.service
    items = await service.in_thread_if_large(_new_items, body.items or [], ())
    return _reply(await conversations.create(current_tenant.get(), body.metadata or {}, items))


@router.get("/v1/conversations/{conversation_id}", responses=ERRORS)
async def retrieve_conversation(conversation_id: str, request: Request) -> ConversationReply:
    """Retrieve a conversation, without its items."""
    return _reply(await _conversations(request).find(current_tenant.get(), conversation_id))


@router.post("/v1/conversations/{conversation_id}", responses=ERRORS)
async def update_conversation(
    conversation_id: str, body: UpdateConversation, request: Request
) -> ConversationReply:
    """Replace a conversation's metadata."""
    changed = await _conversations(request).change(
        current_tenant.get(),
        conversation_id,
        lambda found: replace(found, metadata=body.metadata),
    )
    return _reply(changed)


@router.delete("/v1/conversations/{conversation_id}", responses=ERRORS)
async def delete_conversation(conversation_id: str, request: Request) -> DeletedConversation:
    """Delete a conversation and its items. Its responses are kept."""
    await _conversations(request).delete(current_tenant.get(), conversation_id)
    return DeletedConversation(id=conversation_id, object="conversation.deleted", deleted=True)


@router.post("/v1/conversations/{conversation_id}/items", response_model=ItemList, responses=ERRORS)
async def create_items(conversation_id: str, body: CreateItems, request: Request) -> Response:
    """Append items to a conversation. Returns these items."""
    owner, conversations = current_tenant.get(), _conversations(request)
    found = await conversations.find(owner, conversation_id)
    service: Service = request.app.state.service
    items = await service.in_thread_if_large(_new_items, body.items, found.items.ids)
    added = await conversations.add(owner, conversation_id, items)
    return json_response(added.page(Page(max(len(added), 1), "asc")))


@router.get("/v1/conversations/{conversation_id}/items", response_model=ItemList, responses=ERRORS)
async def list_items(
    conversation_id: str,
    request: Request,
    page: Annotated[Page, Depends()],
) -> Response:
    """List the items of a conversation, newest first by default."""
    found = await _conversations(request).find(current_tenant.get(), conversation_id)
    return json_response(found.items.page(page))


@router.get(
    "/v1/conversations/{conversation_id}/items/{item_id}",
    response_model=dict[str, Any],
    responses=ERRORS,
)
async def retrieve_item(conversation_id: str, item_id: str, request: Request) -> Response:
    """Retrieve an item."""
    found = await _conversations(request).find(current_tenant.get(), conversation_id)
    item = found.items.find(item_id)
    if item is None:
        raise _no_item(conversation_id, item_id)
    return json_response(item)


@router.delete("/v1/conversations/{conversation_id}/items/{item_id}", responses=ERRORS)
async def delete_item(conversation_id: str, item_id: str, request: Request) -> ConversationReply:
    """Delete an item. Returns the conversation."""

    def take_out(found: StoredConversation) -> StoredConversation:
        if item_id not in found.items.ids:
            raise _no_item(conversation_id, item_id)
        return replace(found, items=found.items.without(item_id))

    conversations = _conversations(request)
    return _reply(await conversations.change(current_tenant.get(), conversation_id, take_out))


def _new_items(given: list[Any], known_ids: tuple[str, ...]) -> StoredItems:
    """Convert items for storage. Slow for many items."""
    items = input_items(given, known_ids)
    for item in items:
        if item["type"] == "message":
            item.setdefault("status", "completed")
    with plain_json("items"):
        return StoredItems.of(items, allow_nan=False)


def _conversations(request: Request) -> Conversations:
    conversations: Conversations = request.app.state.responses.conversations
    return conversations


def _no_item(conversation_id: str, item_id: str) -> NotFound:
    message = f"there is no item {item_id!r:.100} in conversation {conversation_id!r:.100}"
    return NotFound(message, "item_id")
