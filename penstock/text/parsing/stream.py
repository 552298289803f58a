"""Reads text that arrives in pieces as if it were complete.

Parsers are generators. They `yield` where they need text that has not arrived, and continue when it
has. They see only characters, never the borders of pieces, so splitting cannot affect the result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]  # a part of a parser that returns T
Sink = Callable[[str], None]

MAX_SHORT = 256  # characters of a name, an id or a header
_SPACE = re.compile(r"\s*")


class Malformed(Exception):
    """What looked like a call is not one."""


class Truncated(Exception):
    """The output ended too early."""


class TextStream:
    """The text of one output. `ended`: no more will come. `is_whole`: it was not cut off.

    From `record()` on, text that is read is kept, so that it can become content again.
    """

    def __init__(self) -> None:
        self.ended = False
        self.is_whole = False
        self.num_bytes_read = 0
        self._text = ""
        self._at = 0  # position of the next character
        self._recorded: list[str] | None = None

    def push(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def record(self, *already_read: str) -> None:
        self._recorded = list(already_read)

    def stop_recording(self) -> str:
        """The text read since `record()`."""
        recorded, self._recorded = "".join(self._recorded or ()), None
        return recorded

    @property
    def _num_unread(self) -> int:
        return len(self._text) - self._at

    def take(self, count: int) -> str:
        """Read the next `count` characters, which must have arrived."""
        text = self._text[self._at : self._at + count]
        self._at += count
        self.num_bytes_read += len(text) if text.isascii() else len(text.encode())
        if self._recorded is not None:
            self._recorded.append(text)
        return text

    def take_rest(self) -> str:
        """Read everything that has arrived."""
        return self.take(self._num_unread)

    def put_back(self, text: str) -> None:
        """Unread `text`, which must be what was read last."""
        if len(text) > self._at:  # more has arrived since
            self._text, self._at = text + self._text[self._at :], len(text)
        self._at -= len(text)
        assert self._text.startswith(text, self._at)
        self.num_bytes_read -= len(text.encode())
        if self._recorded is not None:
            self._recorded.pop()

    def take_match(self, pattern: re.Pattern[str]) -> str:
        """Read as much as `pattern` matches. It must match the empty text."""
        match = pattern.match(self._text, self._at)
        assert match is not None
        return self.take(match.end() - match.start())

    def peek(self, count: int = 1) -> Steps[str]:
        """The next `count` characters, unread; fewer if the output ends before."""
        while self._num_unread < count and not self.ended:
            yield
        return self._text[self._at : self._at + count]

    def next_char(self) -> Steps[str]:
        """The next character, unread. Raises Truncated if there is none."""
        char = yield from self.peek()
        if not char:
            raise Truncated
        return char

    def skip_space(self) -> Steps[str]:
        """Read and return white space."""
        space = self.take_match(_SPACE)
        while not self._num_unread and not self.ended:
            yield
            space += self.take_match(_SPACE)
        return space

    def next_is(self, *literals: str) -> Steps[str | None]:
        """The longest of `literals` that comes next, unread, or None."""
        while not self.ended and any(map(self._ends_within, literals)):
            yield
        fitting = [literal for literal in literals if self._text.startswith(literal, self._at)]
        return max(fitting, key=len, default=None)

    def _ends_within(self, literal: str) -> bool:
        """Whether the unread text is a proper prefix of `literal`."""
        return self._num_unread < len(literal) and literal.startswith(self._text[self._at :])

    def accept(self, *literals: str) -> Steps[str | None]:
        """Read the longest of `literals` that comes next, if any."""
        literal = yield from self.next_is(*literals)
        if literal is not None:
            self.take(len(literal))
        return literal

    def pass_over(self, *literals: str) -> Steps[None]:
        """Read one of `literals` if it comes next. Truncated if the output ends within it."""
        yield from self.next_is(*literals)  # wait until the text suffices to tell
        if self._num_unread and any(map(self._ends_within, literals)):
            raise Truncated
        yield from self.accept(*literals)

    def drop_cut(self, *literals: str) -> bool:
        """Drop the beginning of one of `literals` at the end of an output that was cut off."""
        is_cut = self.ended and not self.is_whole and bool(self._num_unread)
        if is_cut := is_cut and any(map(self._ends_within, literals)):
            self.take_rest()
        return is_cut

    def expect(self, *literals: str) -> Steps[str]:
        """Read one of `literals`.

        Raises Malformed if something else comes, Truncated if the output ends within it.
        """
        literal = yield from self.accept(*literals)
        if literal is None:
            if (yield from self.goes_on_with(*literals)):
                raise Truncated
            found = self._text[self._at : self._at + 20]
            raise Malformed(f"{literals[0]!r} is missing before {found!r}")
        return literal

    def goes_on_with(self, *literals: str) -> Steps[bool]:
        """Whether one of `literals` comes next, or the output ends before that is certain."""
        literal = yield from self.next_is(*literals)
        return literal is not None or any(map(self._ends_within, literals))

    def until(
        self,
        markers: Sequence[str],
        sink: Sink,
        drop_partial: bool = False,
        cut_markers: Sequence[str] = (),
    ) -> Steps[str | None]:
        """Read up to and including the first of `markers`, and pass the text before it to `sink`.

        Returns the marker, or None if the output ends without one. If it ends within a marker, that
        is text, unless `drop_partial`. The longest marker at a position counts. At the end of an
        output that was cut off, the beginning of one of `cut_markers` is dropped as well.
        """
        pattern, prefixes, longest = _compile(tuple(markers))
        while True:
            match = pattern.search(self._text, self._at)
            held = self._partial(prefixes, longest)
            if match is not None and (held is None or match.start() < held.start() or self.ended):
                if match.start() > self._at:
                    sink(self.take(match.start() - self._at))
                return self.take(len(match[0]))
            if self.ended and not drop_partial:
                held = None
                if cut_markers and not self.is_whole:
                    held = self._partial(*_compile(tuple(cut_markers))[1:])
            certain = len(self._text) if held is None else held.start()
            if certain > self._at:
                sink(self.take(certain - self._at))
            if self.ended:
                self.take_rest()
                return None
            yield

    def text_before(self, markers: Sequence[str]) -> Steps[str]:
        """Read the text before the first of `markers` as far as it has arrived.

        At least one character; empty if a marker comes next or the output has ended.
        """
        pattern, prefixes, longest = _compile(tuple(markers))
        while True:
            match = pattern.search(self._text, self._at)
            held = None if self.ended else self._partial(prefixes, longest)
            starts = [found.start() for found in (match, held) if found is not None]
            certain = min(starts, default=len(self._text))
            if certain > self._at:
                return self.take(certain - self._at)
            if self.ended or (match is not None and match.start() == self._at):
                return ""
            yield

    def read_until(self, markers: Sequence[str]) -> Steps[tuple[str, str]]:
        """Read a short text, such as a name, and the marker that ends it.

        Raises Malformed if there is none within about `MAX_SHORT` characters, Truncated if the
        output ends first. Neither reads anything.
        """
        pattern, prefixes, longest = _compile(tuple(markers))
        while True:
            end = self._at + MAX_SHORT + longest
            too_long = len(self._text) >= end
            match = pattern.search(self._text, self._at, end)
            undecided = None if too_long or self.ended else self._partial(prefixes, longest)
            if match is not None and (undecided is None or match.start() < undecided.start()):
                text = self.take(match.start() - self._at)
                return text, self.take(len(match[0]))
            if too_long:
                raise Malformed(f"{markers[0]!r} is missing within {MAX_SHORT} characters")
            if self.ended:
                raise Truncated
            yield

    def _partial(self, prefixes: re.Pattern[str], longest: int) -> re.Match[str] | None:
        """The end of the text, if it may be the beginning of a marker."""
        return prefixes.search(self._text, max(self._at, len(self._text) - longest))


@lru_cache(maxsize=256)
def _compile(markers: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str], int]:
    """A pattern for a marker, a pattern for a text's end that may begin one, and a length.

    The length is that of the longest marker.
    """
    longest_first = sorted(markers, key=len, reverse=True)
    whole = "|".join(map(re.escape, longest_first)) or r"(?!)"
    prefixes = {marker[:length] for marker in markers for length in range(1, len(marker))}
    begun = "|".join(re.escape(prefix) for prefix in sorted(prefixes, key=len, reverse=True))
    longest = max(map(len, markers), default=0)
    return re.compile(whole), re.compile(f"(?:{begun})\\Z" if begun else r"(?!)"), longest
