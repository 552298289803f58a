"""The store of responses: what it keeps, what it drops, and whose it is."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from penstock.server.responses.store import MemoryStore, StoredResponse

MAX_RESPONSES, MAX_BYTES = 4, 400


def make(response_id: str, size: int) -> StoredResponse:
    return StoredResponse.of({"id": response_id, "text": "x" * size}, [{"type": "message"}])


def test_what_is_stored_is_read_as_it_was() -> None:
    items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "é"}]}]
    stored = StoredResponse.of({"id": "resp_1", "output": []}, items)
    assert stored.read() == {"id": "resp_1", "output": []}
    assert stored.read_input() == items


operations = st.lists(
    st.tuples(
        st.sampled_from(["put", "get", "delete"]),
        st.sampled_from(["alice", "bob"]),
        st.sampled_from([f"resp_{i}" for i in range(6)]),
        st.integers(0, 450),
    ),
    max_size=40,
)


@given(operations)
def test_the_least_recently_used_make_room_and_owners_are_apart(
    steps: list[tuple[str, str, str, int]],
) -> None:
    async def check() -> None:
        store = MemoryStore(MAX_RESPONSES, MAX_BYTES)
        expected: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        for action, owner, response_id, size in steps:
            key = (owner, response_id)
            if action == "put":
                stored = make(response_id, size)
                await store.put(owner, stored)
                expected.pop(key, None)
                if stored.num_bytes <= MAX_BYTES:
                    expected[key] = stored
                while (
                    len(expected) > MAX_RESPONSES
                    or sum(item.num_bytes for item in expected.values()) > MAX_BYTES
                ):
                    expected.popitem(last=False)
            elif action == "get":
                assert await store.get(owner, response_id) == expected.get(key)
                if key in expected:
                    expected.move_to_end(key)
            else:
                assert await store.delete(owner, response_id) == (key in expected)
                expected.pop(key, None)
            assert len(store) == len(expected)
            assert store.num_bytes == sum(item.num_bytes for item in expected.values())

    asyncio.run(check())


def test_a_store_without_room_keeps_nothing() -> None:
    async def check() -> None:
        store = MemoryStore(0, MAX_BYTES)
        await store.put("alice", make("resp_1", 1))
        assert await store.get("alice", "resp_1") is None

    asyncio.run(check())
