"""What the scheduler asks of the grammars that outputs are held to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.scheduler.gates import Gate


class Grammars(Gate, Protocol):
    """A gate, at which requests wait for their grammars, that follows what they become."""

    def accept(self, request_id: str, token_ids: Sequence[int], drafts: list[int]) -> int | None:
        """Tokens came for a request: with how many of them its output is complete; None: not yet.

        `drafts` are proposed to come next. Raises `RequestFault`, or `InputError` if the client is
        to blame.
        """

    def is_complete(self, request_id: str) -> bool:
        """Whether nothing may follow what a request has by now."""

    def drop(self, request_id: str) -> None:
        """Forget a request; one that is not here is ignored."""
