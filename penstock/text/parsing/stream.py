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

MAX_SHORT = 256  # characters of a name, an id or a header
_SPACE = re.compile(r"\s*")


class Malformed(Exception):
    """What looked like a call is none."""


class Truncated(Exception):
    """The output ended where more had to come."""


class TextStream:
    """The text of one output. `ended` once no more will come, `is_whole` if no more would have.

    From `record()` on, what is read is kept, so that it can become text again.
    """

    def __init__(self) -> None:
        self.ended = False
        self.is_whole = False
        self.num_bytes_read = 0
        self._text = ""
        self._at = 0  # what comes before has been read
        self._recorded: list[str] | None = None

    def push(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def record(self, *already_read: str) -> None:
        self._recorded = list(already_read)

    def stop_recording(self) -> str:
        """What was read since `record()`."""
        recorded, self._recorded = "".join(self._recorded or ()), None
        return recorded

    @property
    def _num_unread(self) -> int:
        return len(self._text) - self._at

    def take(self, count: int) -> str:
        """The next `count` characters, which must be there."""
        text = self._text[self._at : self._at + count]
        self._at += count
        self.num_bytes_read += len(text) if text.isascii() else len(text.encode())
        if self._recorded is not None:
            self._recorded.append(text)
        return text

    def take_rest(self) -> str:
        """All that is there."""
        return self.take(self._num_unread)

    def put_back(self, text: str) -> None:
        """Unread `text`, which must be what was taken last."""
        if len(text) > self._at:  # more has come since some of it was taken
            self._text, self._at = text + self._text[self._at :], len(text)
        self._at -= len(text)
        assert self._text.startswith(text, self._at)
        self.num_bytes_read -= len(text.encode())
        if self._recorded is not None:
            self._recorded.pop()

    def take_match(self, pattern: re.Pattern[str]) -> str:
        """As much of what is there as `pattern` matches; it must match the empty text."""
        match = pattern.match(self._text, self._at)
        assert match is not None
        return self.take(match.end() - match.start())

    def peek(self, count: int = 1) -> Steps[str]:
        """The next `count` characters, unread; fewer if the output ends before."""
        while self._num_unread < count and not self.ended:
            yield
        return self._text[self._at : self._at + count]

    def next_char(self) -> Steps[str]:
        """The next character, unread. Truncated if there is none."""
        char = yield from self.peek()
        if not char:
            raise Truncated
        return char

    def skip_space(self) -> Steps[str]:
        """Read white space; it is given back."""
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
        """Whether the text so far ends before `literal` does, and fits it."""
        return self._num_unread < len(literal) and literal.startswith(self._text[self._at :])

    def accept(self, *literals: str) -> Steps[str | None]:
        """Read the longest of `literals` that comes next, if any does."""
        literal = yield from self.next_is(*literals)
        if literal is not None:
            self.take(len(literal))
        return literal

    def pass_over(self, *literals: str) -> Steps[None]:
        """The same. Truncated if the output ends within it."""
        yield from self.next_is(*literals)  # so that as much is there as it takes to tell
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
        """Read one of `literals`. Malformed if something else comes, Truncated if the output ends
        within it."""
        literal = yield from self.accept(*literals)
        if literal is None:
            if (yield from self.goes_on_with(*literals)):
                raise Truncated
            found = self._text[self._at : self._at + 20]
            raise Malformed(f"{literals[0]!r} is missing before {found!r}")
        return literal

    def goes_on_with(self, *literals: str) -> Steps[bool]:
        """Whether one of `literals` comes next, or the output ends before that can be told."""
        literal = yield from self.next_is(*literals)
        return literal is not None or any(map(self._ends_within, literals))

    def until(
        self,
        markers: Sequence[str],
        sink: Sink,
        drop_partial: bool = False,
        cut_markers: Sequence[str] = (),
    ) -> Steps[str | None]:
        """Read up to the first of `markers` and over it, passing what comes before to `sink`.

        Returns the marker, or None if the output ends without one; where it ends within one, that
        is text, unless `drop_partial`. Of markers at the same place the longest counts. The
        beginning of one of `cut_markers` is dropped, too, at the end of an output that was cut off.
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
        """Read as much of the text before the first of `markers` as is there, at least a character;
        empty if one of them comes next, or the output has ended."""
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
        """A short text, such as a name, and the marker that ends it.

        Malformed if there is none within `MAX_SHORT` characters or a few more, Truncated if the
        output ends first; neither reads anything.
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
        """The end of what is there, if it may be the beginning of a marker."""
        return prefixes.search(self._text, max(self._at, len(self._text) - longest))


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
