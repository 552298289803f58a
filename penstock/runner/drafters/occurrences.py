"""Occurrences: where short sequences of tokens occur in texts.

It serves suffix decoding in place of a suffix tree: the same counts, for the most recent places, at
a few hundred bytes a token, and old texts leave at little cost.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

TOKEN_BYTES = array("i").itemsize
TOKEN_BITS = 8 * TOKEN_BYTES
ANCHORS = (6, 2)  # lengths by which places are found: the longest that occurs is used
MOST_PLACES = 8  # that are compared, the most recent ones
SEPARATOR = -1  # between texts; no token


class Occurrences:
    """Texts, and where each anchor occurs in them: a sequence of 6 or 2 tokens.

    A place is the position of the token after an anchor. Places of one anchor form a chain from the
    last one backwards.
    """

    def __init__(self) -> None:
        self._tokens = array("i")
        self._start = 0  # position of the first token that is kept
        self._text_start = 0  # of the text that grows
        # The bytes of an anchor; by anchor: its last place; by place: the one before it.
        self._indexes = [(TOKEN_BYTES * n, dict[bytes, int](), array("q")) for n in ANCHORS]

    @property
    def end(self) -> int:
        return self._start + len(self._tokens)

    def begin_text(self) -> None:
        """What is appended from now on does not follow what was."""
        self.extend([SEPARATOR])
        self._text_start = self.end

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the text, and index the anchors that they follow."""
        first, count = self.end, len(token_ids)
        self._tokens.extend(token_ids)
        low = max(first - ANCHORS[0], self._text_start)
        window = self._tokens[low - self._start :].tobytes()
        start, end = TOKEN_BYTES * (first - low), TOKEN_BYTES * (first - low + count)
        for size, last, previous in self._indexes:
            place = first
            for at in range(start, end, TOKEN_BYTES):
                if at < size or token_ids[place - first] == SEPARATOR:
                    previous.append(-1)
                else:
                    anchor = window[at - size : at]
                    previous.append(last.get(anchor, -1))
                    last[anchor] = place
                place += 1

    def cut(self, end: int) -> None:
        """Forget all before `end`, where a text begins."""
        self._unlink(self._start, end)
        count = end - self._start
        del self._tokens[:count]
        for _, _, previous in self._indexes:
            del previous[:count]
        self._start = end

    def blank(self, start: int, end: int) -> None:
        """Let nothing match a text that is not the first one."""
        self._unlink(start, end)
        for position in range(start, end):
            self._tokens[position - self._start] = SEPARATOR

    def _unlink(self, start: int, end: int) -> None:
        """Let no chain begin in these places, which are whole texts."""
        window = self._tokens[start - self._start : end - self._start].tobytes()
        for size, last, previous in self._indexes:
            for place in range(end - 1, start + size // TOKEN_BYTES - 1, -1):
                at = TOKEN_BYTES * (place - start)
                anchor = window[at - size : at]
                if last.get(anchor) == place:
                    before = previous[place - self._start]
                    if before >= self._start:
                        last[anchor] = before
                    else:
                        del last[anchor]

    def tail(self, count: int) -> array[int]:
        """The last tokens, at most `count`."""
        return self._tokens[-count:]

    def since(self, position: int) -> array[int]:
        return self._tokens[position - self._start :]

    def find(self, tail: array[int]) -> list[tuple[int, int]]:
        """Match length and place of each compared occurrence of the end of `tail`.

        `tail`: as many of the last tokens as may count, in order. The most recent comes first.
        """
        tokens, start, depth = self._tokens, self._start, len(tail)
        text = tail.tobytes()
        size, last, _ = self._indexes[-1]
        if text[-size:] not in last:
            return []  # nor does a longer anchor occur, then
        wanted = int.from_bytes(text, "little")
        for size, last, previous in self._indexes:
            if len(text) < size:
                continue
            found: list[tuple[int, int]] = []
            place = last.get(text[-size:], -1)
            while place >= start and len(found) < MOST_PLACES:
                at = place - start
                own = tokens[at - depth : at] if at >= depth else tokens[:at]
                matched = len(own)
                # In an integer the last token has the highest bits.
                bits = int.from_bytes(own.tobytes(), "little")
                if differing := bits ^ (wanted >> TOKEN_BITS * (depth - matched)):
                    matched -= 1 + (differing.bit_length() - 1) // TOKEN_BITS
                if TOKEN_BYTES * matched >= size:
                    found.append((matched, place))
                place = previous[at]
            if found:
                return found
        return []

    def following(self, place: int, count: int, loops: bool) -> list[int]:
        """At most `count` tokens from a place on, to the end of its text.

        `loops`: at the end, the text is taken to repeat itself from the place on.
        """
        at = place - self._start
        found = self._tokens[at : at + count].tolist()
        if SEPARATOR in found:
            return found[: found.index(SEPARATOR)]
        while loops and len(found) < count:
            found += found[: count - len(found)]
        return found
