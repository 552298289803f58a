"""The store of responses and conversations: what it keeps, what it drops, and whose it is."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.errors import InputError
from penstock.server.responses.store import (
    MemoryStore,
    Page,
    Stored,
    StoredConversation,
    StoredItems,
    StoredResponse,
    StoreLimits,
)

LIMITS = StoreLimits(max_entries=4, max_bytes=400, max_bytes_per_owner=300, max_items=3)


def make(response_id: str, size: int) -> StoredResponse:
    return StoredResponse(
        response_id, "completed", False, b"x" * size, StoredItems(), StoredItems()
    )


def message(item_id: str, text: str = "é") -> dict[str, Any]:
    content = [{"type": "input_text", "text": text}]
    return {"type": "message", "id": item_id, "role": "user", "content": content}


def test_what_is_stored_is_read_as_it_was() -> None:
    items = [message("a"), message("b")]
    stored = StoredItems.of(items)
    assert stored.read() == items
    assert json.loads(stored.find("b") or b"") == items[1]
    assert stored.find("c") is None
    assert stored.without("a") == StoredItems.of(items[1:])
    assert StoredItems.of(items[:1]) + StoredItems.of(items[1:]) == stored


@pytest.mark.parametrize("order", ["asc", "desc"])
@given(ids=st.lists(st.sampled_from("abcdef"), max_size=8), limit=st.integers(1, 4))
def test_pages_make_up_the_list(order: Literal["asc", "desc"], ids: list[str], limit: int) -> None:
    """All of it where ids are unique; where they are not, the last page comes all the same."""
    items = StoredItems.of([message(item_id) for item_id in ids])
    seen: list[str] = []
    after: str | None = None
    for _ in range(len(ids) + 1):
        page = json.loads(items.page(Page(limit, order, after)))
        shown = [item["id"] for item in page["data"]]
        assert len(shown) <= limit
        assert (page["first_id"], page["last_id"]) == (
            (shown[0], shown[-1]) if shown else (None, None)
        )
        seen += shown
        after = page["last_id"]
        if not page["has_more"]:
            break
    assert not page["has_more"]
    if len(set(ids)) == len(ids):
        assert seen == (ids if order == "asc" else ids[::-1])


def test_a_page_behind_an_item_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match="no item 'b'"):
        StoredItems.of([message("a")]).page(Page(1, "asc", "b"))


def test_a_page_is_cut_without_looking_at_the_other_items() -> None:
    items = StoredItems(tuple("abc"), (b"no JSON", b'{"id": "b"}', b"no JSON"))
    assert json.loads(items.page(Page(1, "asc", "a")))["data"] == [{"id": "b"}]


operations = st.lists(
    st.tuples(
        st.sampled_from(["put", "get", "delete"]),
        st.sampled_from(["alice", "bob", "carol"]),
        st.sampled_from([f"resp_{i}" for i in range(6)]),
        st.integers(0, 350),
    ),
    max_size=40,
)


class Model:
    """The same rules, told slowly: everything is looked at anew each time."""

    def __init__(self) -> None:
        self.entries: OrderedDict[tuple[str, str], Stored] = OrderedDict()

    def sizes(self, owner: str) -> list[int]:
        return [item.num_bytes for (name, _), item in self.entries.items() if name == owner]

    def drop_oldest(self, owner: str) -> None:
        del self.entries[next(key for key in self.entries if key[0] == owner)]

    def put(self, owner: str, stored: Stored) -> bool:
        size = stored.num_bytes
        if size > LIMITS.max_bytes_per_owner:
            return False
        self.entries.pop((owner, stored.id), None)
        while sum(self.sizes(owner)) + size > LIMITS.max_bytes_per_owner:
            self.drop_oldest(owner)
        while sum(item.num_bytes for item in self.entries.values()) + size > LIMITS.max_bytes:
            weights = {name: sum(self.sizes(name)) for name, _ in self.entries}
            self.drop_oldest(self._most(weights, owner, size))
        while len(self.entries) >= LIMITS.max_entries:
            weights = {name: len(self.sizes(name)) for name, _ in self.entries}
            self.drop_oldest(self._most(weights, owner, 1))
        self.entries[owner, stored.id] = stored
        return True

    def _most(self, weights: dict[str, int], owner: str, size: int) -> str:
        if owner in weights:
            weights[owner] += size
        return max(weights, key=lambda name: (weights[name], name == owner, name))


@given(operations)
def test_the_least_recently_used_of_the_heaviest_make_room_and_owners_are_apart(
    steps: list[tuple[str, str, str, int]],
) -> None:
    async def check() -> None:
        store, expected = MemoryStore(LIMITS), Model()
        for action, owner, response_id, size in steps:
            key = (owner, response_id)
            if action == "put":
                stored = make(response_id, size)
                assert await store.put(owner, stored) == expected.put(owner, stored)
            elif action == "get":
                assert await store.get(owner, response_id) == expected.entries.get(key)
                if key in expected.entries:
                    expected.entries.move_to_end(key)
            else:
                assert await store.delete(owner, response_id) == (key in expected.entries)
                expected.entries.pop(key, None)
            assert store.num_entries == len(expected.entries) <= LIMITS.max_entries
            sizes = [item.num_bytes for item in expected.entries.values()]
            assert store.num_bytes == sum(sizes) <= LIMITS.max_bytes

    asyncio.run(check())


def test_one_who_stores_much_pushes_out_nobody_who_stores_little() -> None:
    async def check() -> None:
        store = MemoryStore(LIMITS)
        await store.put("alice", make("resp_a", 50))
        for index in range(100):
            assert await store.put("mallory", make(f"resp_{index}", index % 200))
        assert await store.get("alice", "resp_a") is not None

    asyncio.run(check())


@pytest.mark.parametrize(
    ("limits", "stored", "reason"),
    [
        (StoreLimits(0, 400, 300, 3), make("resp_1", 1), "--max-stored-responses"),
        (LIMITS, make("resp_1", 301), "--max-stored-response-bytes-per-key"),
        (
            StoreLimits(4, 10_000, 10_000, 3),
            StoredConversation("conv_1", 0, {}, StoredItems.of([message(i) for i in "abcd"])),
            "--max-stored-items",
        ),
    ],
)
def test_what_there_is_no_room_for_is_not_kept(
    limits: StoreLimits, stored: Stored, reason: str
) -> None:
    async def check() -> None:
        store = MemoryStore(limits)
        assert reason in (store.refusal(stored.num_bytes, stored.num_items) or "")
        assert not await store.put("alice", stored)
        assert await store.get("alice", stored.id) is None

    asyncio.run(check())
