"""Where responses are kept, so that they can be read again and conversations go on after them."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Protocol

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredResponse:
    """One response as JSON, and the items of the conversation that it answers.

    The items are all of them, from the conversation's first on: a response can be continued
    whether or not those before it are still there.
    """

    id: str
    response: bytes
    input_items: bytes

    @classmethod
    def of(cls, response: dict[str, Any], input_items: list[dict[str, Any]]) -> StoredResponse:
        return cls(response["id"], json.dumps(response).encode(), json.dumps(input_items).encode())

    @property
    def num_bytes(self) -> int:
        return len(self.id) + len(self.response) + len(self.input_items)

    def read(self) -> dict[str, Any]:
        response: dict[str, Any] = json.loads(self.response)
        return response

    def read_input(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = json.loads(self.input_items)
        return items


class ResponseStore(Protocol):
    """Keeps responses by owner: what one owner put, no other can find, whatever ids it tries."""

    async def put(self, owner: str, stored: StoredResponse) -> None:
        """Keep it, in place of an earlier one of the same id. It may be dropped at any time."""

    async def get(self, owner: str, response_id: str) -> StoredResponse | None: ...

    async def delete(self, owner: str, response_id: str) -> bool:
        """Whether there was one."""


class MemoryStore(ResponseStore):
    """In this process's memory; drops those that were not used for longest where it gets full."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    async def put(self, owner: str, stored: StoredResponse) -> None:
        self._drop((owner, stored.id))
        if stored.num_bytes > self._max_bytes or self._max_responses == 0:
            logger.warning(
                "Response %s of %d bytes is not stored: --max-stored-response-bytes and "
                "--max-stored-responses are %d and %d",
                *(stored.id, stored.num_bytes, self._max_bytes, self._max_responses),
            )
            return
        self._entries[owner, stored.id] = stored
        self.num_bytes += stored.num_bytes
        while self.num_bytes > self._max_bytes or len(self._entries) > self._max_responses:
            self._drop(next(iter(self._entries)))

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        stored = self._entries.get((owner, response_id))
        if stored is not None:
            self._entries.move_to_end((owner, response_id))
        return stored

    async def delete(self, owner: str, response_id: str) -> bool:
        return self._drop((owner, response_id))

    def _drop(self, key: tuple[str, str]) -> bool:
        stored = self._entries.pop(key, None)
        if stored is not None:
            self.num_bytes -= stored.num_bytes
        return stored is not None
