"""Text that arrives in pieces, read as if it were whole.

Parsers are generators: they `yield` where they need text that has not come yet, and go on when it
has. They see characters only, never where one piece ended and the next began, so that no split of
a text can make a difference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]  # a part of a parser that returns T
Sink = Callable[[str], None]

_SPACE = re.compile(r"\s*")


class Malformed(Exception):
    """What looked like a call is none."""


class Truncated(Exception):
    """The output ended where more had to come."""


class Stream:
    """The text of one output. `ended` once no more will come.

    From `record()` on, what is read is kept, so that it can become text again.
    """

    def __init__(self) -> None:
        self.ended = False
        self.num_bytes_read = 0
        self.noise: tuple[str, ...] = ()  # markers that frame the content and are no part of it
        self._unread = ""
        self._recorded: list[str] | None = None

    def push(self, text: str) -> None:
        self._unread += text

    def record(self, *already_read: str) -> None:
        self._recorded = list(already_read)

    def stop_recording(self) -> str:
        """What was read since `record()`."""
        recorded, self._recorded = "".join(self._recorded or ()), None
        return recorded

    def take(self, count: int) -> str:
        """The next `count` characters, which must be there."""
        text, self._unread = self._unread[:count], self._unread[count:]
        self.num_bytes_read += len(text) if text.isascii() else len(text.encode())
        if self._recorded is not None:
            self._recorded.append(text)
        return text

    def put_back(self, text: str) -> None:
        """Unread `text`, which must be what was taken last."""
        self._unread = text + self._unread
        self.num_bytes_read -= len(text.encode())
        if self._recorded is not None:
            taken = self._recorded.pop()
            assert taken == text

    def peek(self, count: int = 1) -> Steps[str]:
        """The next `count` characters, unread; fewer if the output ends before."""
        while len(self._unread) < count and not self.ended:
            yield
        return self._unread[:count]

    def available(self) -> Steps[str]:
        """All that has come and is unread: at least one character, unless the output has ended."""
        yield from self.peek()
        return self._unread

    def next_char(self) -> Steps[str]:
        """The next character, unread. Truncated if there is none."""
        char = yield from self.peek()
        if not char:
            raise Truncated
        return char

    def skip_space(self) -> Steps[str]:
        """Read white space; it is given back."""
        pieces = []
        while True:
            match = _SPACE.match(self._unread)
            assert match is not None
            pieces.append(self.take(match.end()))
            if self._unread or self.ended:
                return "".join(pieces)
            yield

    def next_is(self, *literals: str) -> Steps[str | None]:
        """The longest of `literals` that comes next, unread, or None."""
        while True:
            undecided = any(
                len(self._unread) < len(literal) and literal.startswith(self._unread)
                for literal in literals
            )
            if not undecided or self.ended:
                fitting = [literal for literal in literals if self._unread.startswith(literal)]
                return max(fitting, key=len, default=None)
            yield

    def accept(self, *literals: str) -> Steps[str | None]:
        """Read the longest of `literals` that comes next, if any does."""
        literal = yield from self.next_is(*literals)
        if literal is not None:
            self.take(len(literal))
        return literal

    def expect(self, *literals: str) -> Steps[str]:
        """Read one of `literals`. Malformed if something else comes, Truncated if the output ends
        within it."""
        literal = yield from self.accept(*literals)
        if literal is None:
            if (yield from self.goes_on_with(*literals)):
                raise Truncated
            raise Malformed(f"{literals[0]!r} is missing before {self._unread[:20]!r}")
        return literal

    def goes_on_with(self, *literals: str) -> Steps[bool]:
        """Whether one of `literals` comes next, or the output ends before that can be told."""
        literal = yield from self.next_is(*literals)
        if literal is not None:
            return True
        return self.ended and any(text.startswith(self._unread) for text in literals)

    def until(
        self, markers: Sequence[str], sink: Sink, drop_partial: bool = False
    ) -> Steps[str | None]:
        """Read up to the first of `markers` and over it, passing what comes before to `sink`.

        Returns the marker, or None if the output ends without one; where it ends within one, that
        is text, unless `drop_partial`. Of markers at the same place the longest counts.
        """
        pattern, prefixes, longest = _compile(tuple(markers))
        while True:
            match = pattern.search(self._unread)
            # The text's end may be the beginning of a marker.
            held = prefixes.search(self._unread, max(0, len(self._unread) - longest))
            if match is not None and (held is None or match.start() < held.start() or self.ended):
                if match.start():
                    sink(self.take(match.start()))
                return self.take(len(match[0]))
            whole = self.ended and not drop_partial
            count = len(self._unread) if whole or held is None else held.start()
            if count:
                sink(self.take(count))
            if self.ended:
                return None
            yield

    def read_until(self, markers: Sequence[str], at_most: int = 256) -> Steps[tuple[str, str]]:
        """A short text and the marker that ends it. Malformed if it has more than `at_most`
        characters, Truncated if the output ends first."""
        pieces: list[str] = []
        length = 0

        def add(piece: str) -> None:
            nonlocal length
            pieces.append(piece)
            length += len(piece)
            if length > at_most:
                raise Malformed(f"{markers[0]!r} is missing within {at_most} characters")

        marker = yield from self.until(markers, add)
        if marker is None:
            raise Truncated
        return "".join(pieces), marker


@lru_cache(maxsize=256)
def _compile(markers: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str], int]:
    """What finds a marker; what finds the longest end of a text that could grow into one; and how
    many characters the longest marker has."""
    longest_first = sorted(markers, key=len, reverse=True)
    whole = "|".join(map(re.escape, longest_first)) or r"(?!)"
    prefixes = {marker[:length] for marker in markers for length in range(1, len(marker))}
    begun = "|".join(re.escape(prefix) for prefix in sorted(prefixes, key=len, reverse=True))
    longest = max(map(len, markers), default=0)
    return re.compile(whole), re.compile(f"(?:{begun})\\Z" if begun else r"(?!)"), longest
