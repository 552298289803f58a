"""N-gram drafts (prompt lookup): what followed the last tokens when they occurred before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from penstock.protocol.step import NewRequest
from penstock.runner.drafters.host import HostDrafter

TOKEN_BYTES = array("i").itemsize


class NgramIndex:
    """One request's tokens, and where each n-gram of them was last seen.

    A token is indexed once, under an n-gram of each length. The memory is that of about
    `lengths` x 100 bytes a token, a small part of what its KV cache takes.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = [TOKEN_BYTES * n for n in range(longest, shortest - 1, -1)]  # longest first
        self._tokens = array("i")
        self._next: dict[bytes, int] = {}  # by n-gram: the position after its last occurrence

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens, and index the n-grams that they follow.

        The n-grams that end the text follow with its next token, so that a lookup cannot find the
        end itself.
        """
        tokens, following = self._tokens, self._next
        first, longest = len(tokens), self._sizes[0] // TOKEN_BYTES
        tokens.extend(token_ids)
        low = max(first - longest, 0)
        window = tokens[low:-1].tobytes() if token_ids else b""
        for position in range(max(first, 1), len(tokens)):
            end = TOKEN_BYTES * (position - low)
            for size in self._sizes:
                if size <= end:
                    following[window[end - size : end]] = position

    def draft(self, num_drafts: int) -> list[int]:
        """What followed the longest match, the last one of that length. Empty without a match.

        If the text ends before `num_drafts` tokens, it is taken to repeat itself from there.
        """
        tail = self._tokens[-(self._sizes[0] // TOKEN_BYTES) :].tobytes()
        for size in self._sizes:
            position = self._next.get(tail[-size:]) if size <= len(tail) else None
            if position is not None:
                drafts = self._tokens[position : position + num_drafts].tolist()
                while len(drafts) < num_drafts:
                    drafts += drafts[: num_drafts - len(drafts)]
                return drafts
        return []


class NgramDrafter(HostDrafter):
    def __init__(self, num_drafts: int, shortest: int, longest: int) -> None:
        super().__init__(num_drafts)
        self._lengths = shortest, longest
        self._indexes: dict[int, NgramIndex] = {}  # by slot

    def enter(self, slot: int, request: NewRequest) -> None:
        self._indexes[slot] = NgramIndex(*self._lengths)
        self._indexes[slot].extend(request.token_ids)

    def remove(self, slot: int) -> None:
        super().remove(slot)
        self._indexes.pop(slot, None)

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        self._indexes[slot].extend(token_ids)

    def draft(self, slot: int, num_drafts: int) -> list[int]:
        return self._indexes[slot].draft(num_drafts)
