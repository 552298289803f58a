"""N-gram drafts (prompt lookup): what followed the last tokens when they occurred before."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

from penstock.protocol.step import NewRequest
from penstock.runner.drafters.chances import ALONE, OWN, kind_of
from penstock.runner.drafters.host import Draft, HostDrafter

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
        self._distance, self._num_matched = 0, 0  # of the last match: back to its place; tokens
        self._num_then = 0  # tokens at that time

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

    def find(self) -> tuple[int, int] | None:
        """Matched tokens and place of the longest match, the last one of that length, if any.

        The place is the position after the match. A match that continues the one of the last
        call counts with all its tokens.
        """
        tail = self._tokens[-(self._sizes[0] // TOKEN_BYTES) :].tobytes()
        if tail[-self._sizes[-1] :] not in self._next:
            return None  # then no longer one occurred, either
        for size in self._sizes:
            place = self._next.get(tail[-size:]) if size <= len(tail) else None
            if place is not None:
                break
        assert place is not None, "the shortest one occurred"
        num_tokens, length = len(self._tokens), size // TOKEN_BYTES
        if num_tokens - place == self._distance:
            length = max(length, self._num_matched + num_tokens - self._num_then)
        self._distance, self._num_matched, self._num_then = num_tokens - place, length, num_tokens
        return length, place

    def following(self, place: int, count: int) -> list[int]:
        """`count` tokens from a place on. At its end, the text is taken to repeat itself from the
        place on."""
        found = self._tokens[place : place + count].tolist()
        while len(found) < count:
            found += found[: count - len(found)]
        return found


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

    def search(self, slot: int, num_drafts: int) -> Iterable[Iterator[Draft]]:
        index = self._indexes[slot]
        match = index.find()
        if match is None:
            return ()
        length, place = match
        tokens = index.following(place, num_drafts)
        return (((token, kind_of(OWN, ALONE, length + at)) for at, token in enumerate(tokens)),)
