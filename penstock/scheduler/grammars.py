"""Grammars: the interface through which the scheduler follows structured outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.scheduler.gates import Gate


class Grammars(Gate, Protocol):
    """A gate where requests wait for their grammar. It then follows each output token by token."""

    def accept(self, request_id: str, token_ids: Sequence[int], drafts: list[int]) -> int | None:
        """Advance a request's grammar by its new tokens.

        Returns the number of tokens that complete the output, or None if it is not complete.
        `drafts` are the draft tokens proposed for the next step. Raises `RequestFault`, or
        `InputError` if the request itself is wrong.
        """

    def is_complete(self, request_id: str) -> bool:
        """Whether the output is complete, so that no token may follow."""

    def drop(self, request_id: str) -> None:
        """Forget a request. Unknown requests are ignored."""
