"""ResponseStore: decides which responses and conversations are kept, and which are evicted.

Items are stored as JSON. A page of items is sliced and joined without parsing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol

from fastapi import Query

from penstock.config import ServerConfig
from penstock.protocol.errors import InputError
from penstock.server.responses.items import Item, new_item_id

logger = logging.getLogger(__name__)

Order = Literal["asc", "desc"]
# Python's overhead per item beside its JSON and id: two objects and a place in two tuples.
ITEM_OVERHEAD_BYTES = 112


@dataclass(frozen=True)
class Page:
    """At most `limit` items behind the item `after`."""

    limit: Annotated[int, Query(ge=1, le=100)] = 20
    order: Order = "desc"
    after: str | None = None


@dataclass(frozen=True)
class StoredItems:
    """Items of a conversation as JSON, and their ids."""

    ids: tuple[str, ...] = ()
    encoded: tuple[bytes, ...] = ()
    num_bytes: int = 0

    @classmethod
    def of(cls, items: Sequence[Item], allow_nan: bool = True) -> StoredItems:
        """Encode items. Slow for many, but lets other threads run between items.

        Raises the errors of `json.dumps`.
        """
        ids = tuple(item["id"] for item in items)
        encoded = tuple(json.dumps(item, allow_nan=allow_nan).encode() for item in items)
        return cls._weighed(ids, encoded)

    @classmethod
    def _weighed(cls, ids: tuple[str, ...], encoded: tuple[bytes, ...]) -> StoredItems:
        num_bytes = sum(map(len, ids)) + sum(map(len, encoded)) + ITEM_OVERHEAD_BYTES * len(ids)
        return cls(ids, encoded, num_bytes)

    def __len__(self) -> int:
        return len(self.ids)

    def __add__(self, other: StoredItems) -> StoredItems:
        return StoredItems(
            self.ids + other.ids, self.encoded + other.encoded, self.num_bytes + other.num_bytes
        )

    def read(self) -> list[Item]:
        """Decode all items. Slow for many, but lets other threads run between items."""
        return [json.loads(item) for item in self.encoded]

    def find(self, item_id: str) -> bytes | None:
        """Return one item as JSON, or None."""
        return self.encoded[self.ids.index(item_id)] if item_id in self.ids else None

    def without(self, item_id: str) -> StoredItems:
        at = self.ids.index(item_id)
        return self._weighed(
            self.ids[:at] + self.ids[at + 1 :], self.encoded[:at] + self.encoded[at + 1 :]
        )

    def apart_from(self, taken: Sequence[str]) -> StoredItems:
        """Replace ids that are taken, such as by items that were added concurrently."""
        clashes = set(taken).intersection(self.ids)
        if not clashes:
            return self
        items = self.read()
        for item in items:
            if item["id"] in clashes:
                item["id"] = new_item_id(item["type"])
        return StoredItems.of(items)

    def page(self, page: Page) -> bytes:
        """Return a page of items in the API's list format."""
        order, after = page.order, page.after
        places = range(len(self.ids))  # slicing and reversing a range is O(1)
        if order == "desc":
            places = places[::-1]
        if after is not None:
            if after not in self.ids:
                raise InputError(f"there is no item {after!r:.100} in this conversation", "after")
            at = self.ids.index(after)
            if order == "asc":  # after the last of equal ids, or paging would never end
                with contextlib.suppress(ValueError):
                    while True:
                        at = self.ids.index(after, at + 1)
            places = places[places.index(at) + 1 :]
        shown = places[: page.limit]
        ends = {
            "first_id": self.ids[shown[0]] if shown else None,
            "last_id": self.ids[shown[-1]] if shown else None,
            "has_more": len(places) > len(shown),
        }
        data = b", ".join([self.encoded[at] for at in shown])
        return b'{"object": "list", "data": [' + data + b"], " + json.dumps(ends).encode()[1:]


@dataclass(frozen=True)
class StoredResponse:
    """One response as JSON, and the items of the conversation that it answers.

    It holds all items from the beginning, so that it can be continued even if earlier responses
    were evicted.
    """

    id: str
    status: str
    is_background: bool
    response: bytes
    input: StoredItems
    output: StoredItems

    @property
    def num_bytes(self) -> int:
        return len(self.response) + self.input.num_bytes + self.output.num_bytes

    @property
    def num_items(self) -> int:
        return len(self.input)


@dataclass(frozen=True)
class StoredConversation:
    """A conversation that responses add to."""

    id: str
    created_at: int
    metadata: dict[str, str]
    items: StoredItems

    @property
    def num_bytes(self) -> int:
        return self.items.num_bytes + sum(len(k) + len(v) for k, v in self.metadata.items())

    @property
    def num_items(self) -> int:
        return len(self.items)


Stored = StoredResponse | StoredConversation


class ResponseStore(Protocol):
    """Stores entries by owner. No owner can find another's entries, even with their ids."""

    num_entries: int
    num_bytes: int

    def refusal(self, num_bytes: int, num_items: int) -> str | None:
        """Why an entry of this size cannot be stored, or None if it can."""

    async def put(self, owner: str, stored: Stored) -> bool:
        """Store an entry. Replaces one with the same id. It may be evicted at any time.

        Returns False if it is too large. An earlier entry with the same id then stays.
        """

    async def get(self, owner: str, stored_id: str) -> Stored | None: ...

    async def delete(self, owner: str, stored_id: str) -> bool:
        """Delete an entry. Returns whether it existed."""

    def changing(self) -> AbstractAsyncContextManager[None]:
        """Within it, nobody else changes an entry that exists."""


@dataclass(frozen=True)
class StoreLimits:
    """Limits of a store: in total, per owner, and items per response or conversation."""

    max_entries: int
    max_bytes: int
    max_bytes_per_owner: int
    max_items: int


@dataclass
class _Shelf:
    """One owner's entries, least recently used first."""

    entries: OrderedDict[str, Stored] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class MemoryStore(ResponseStore):
    """Stores entries in this process's memory. Evicts the least recently used ones when full.

    An owner above its own limit loses its own entries. If all owners together exceed the limit, the
    owner with the most loses entries. So heavy owners cannot push out light ones.
    """

    def __init__(self, limits: StoreLimits) -> None:
        self._limits = limits
        self._shelves: dict[str, _Shelf] = {}
        self._changing = asyncio.Lock()
        self.num_entries = 0
        self.num_bytes = 0

    def refusal(self, num_bytes: int, num_items: int) -> str | None:
        limits = self._limits
        if limits.max_entries == 0:
            return "nothing is stored here (--max-stored-responses is 0)"
        if num_items > limits.max_items:
            return f"{num_items} items are more than the {limits.max_items} of --max-stored-items"
        if num_bytes > (most := min(limits.max_bytes, limits.max_bytes_per_owner)):
            return (
                f"{num_bytes} bytes are more than the {most} that --max-stored-response-bytes and "
                "--max-stored-response-bytes-per-key leave to one"
            )
        return None

    async def put(self, owner: str, stored: Stored) -> bool:
        if (refusal := self.refusal(stored.num_bytes, stored.num_items)) is not None:
            logger.warning("%s is not stored: %s", stored.id, refusal)
            return False
        self._drop(owner, stored.id)
        limits, size = self._limits, stored.num_bytes
        own = self._shelves.get(owner, _Shelf())
        while own.entries and own.num_bytes + size > limits.max_bytes_per_owner:
            self._drop_oldest(owner)
        while self.num_bytes + size > limits.max_bytes:
            self._drop_oldest(self._heaviest(owner, size, lambda shelf: shelf.num_bytes))
        while self.num_entries + 1 > limits.max_entries:
            self._drop_oldest(self._heaviest(owner, 1, lambda shelf: len(shelf.entries)))
        shelf = self._shelves.setdefault(owner, _Shelf())
        shelf.entries[stored.id] = stored
        shelf.num_bytes += size
        self.num_bytes += size
        self.num_entries += 1
        return True

    async def get(self, owner: str, stored_id: str) -> Stored | None:
        shelf = self._shelves.get(owner)
        if shelf is None or stored_id not in shelf.entries:
            return None
        shelf.entries.move_to_end(stored_id)
        return shelf.entries[stored_id]

    async def delete(self, owner: str, stored_id: str) -> bool:
        return self._drop(owner, stored_id)

    def changing(self) -> asyncio.Lock:
        return self._changing

    def _heaviest(self, owner: str, size: int, weigh: Callable[[_Shelf], int]) -> str:
        """The owner with the most if `owner` had `size` more. `owner` itself wins a tie."""

        def key(name: str) -> tuple[int, bool, str]:
            is_own = name == owner
            return weigh(self._shelves[name]) + size * is_own, is_own, name

        return max(self._shelves, key=key)

    def _drop_oldest(self, owner: str) -> None:
        self._drop(owner, next(iter(self._shelves[owner].entries)))

    def _drop(self, owner: str, stored_id: str) -> bool:
        shelf = self._shelves.get(owner)
        stored = shelf.entries.pop(stored_id, None) if shelf is not None else None
        if shelf is None or stored is None:
            return False
        shelf.num_bytes -= stored.num_bytes
        self.num_bytes -= stored.num_bytes
        self.num_entries -= 1
        if not shelf.entries:
            del self._shelves[owner]
        return True


def memory_store(config: ServerConfig) -> MemoryStore:
    """A store with the limits of the options."""
    has_keys = bool(config.api_key or config.admin_api_key)
    most = config.max_stored_response_bytes
    return MemoryStore(
        StoreLimits(
            max_entries=config.max_stored_responses,
            max_bytes=most,
            max_bytes_per_owner=config.max_stored_response_bytes_per_key if has_keys else most,
            max_items=config.max_stored_items,
        )
    )
