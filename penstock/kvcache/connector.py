"""The seam to KV that lives elsewhere: another engine, another tier of memory."""

from __future__ import annotations

import enum
from typing import Protocol

from penstock.kvcache.manager import CacheableRequest


class BlockFate(enum.Enum):
    """What becomes of a finished request's blocks."""

    FREE = "free"
    KEEP = "keep"  # until `Scheduler.release_kept` is called for the request


class Connector(Protocol):
    def match(self, request: CacheableRequest, num_local: int) -> int | None:
        """How many tokens beyond the first `num_local` it will bring; None: ask again later."""

    def on_finish(self, request: CacheableRequest, block_ids: list[list[int]]) -> BlockFate:
        """Called once when a request that holds blocks (given by group) ends."""
