"""Collects what a parser finds into deltas, and decides which white space to keep.

White space between text and a call, or between reasoning and answer, belongs to the format. It is
dropped.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection
from itertools import groupby

from penstock.text.parsing.deltas import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBroken,
    ToolCallEnd,
    ToolCallStart,
)
from penstock.text.parsing.stream import Malformed, TextStream

logger = logging.getLogger(__name__)


class Emitter:
    """The deltas of one output. `next_index` is the number of calls that have begun.

    With `only`, a call of another name is Malformed.
    """

    def __init__(
        self,
        stream: TextStream,
        new_call_id: Callable[[], str],
        next_index: int = 0,
        only: Collection[str] | None = None,
    ) -> None:
        self.next_index = next_index
        self.reasoning_spans: deque[tuple[int, int | None]] = deque()  # in bytes of the text
        self._stream = stream
        self._new_call_id = new_call_id
        self._only = only
        self._deltas: list[Delta] = []
        self._space: list[str] = []  # held back until the next item is known
        self._space_before_call = ""
        self._drop_space = False  # drop the next white space: it belongs to the format
        self._in_reasoning = False
        self._in_call = False
        self._warned = False

    @property
    def in_call(self) -> bool:
        return self._in_call

    def drain(self) -> list[Delta]:
        """The deltas since the last call. Adjacent pieces of the same item are joined."""
        deltas, self._deltas = self._deltas, []
        return _joined(deltas)

    def finish(self) -> None:
        """The output has ended. White space held back is part of the message."""
        space = self._take_space()
        if space and not self._in_reasoning:
            self._deltas.append(ContentDelta(space))

    def content(self, text: str) -> None:
        text = self._trim(text)
        if text:
            self._deltas.append(ContentDelta(text))

    def begin_reasoning(self) -> None:
        self.finish()
        self._in_reasoning = True
        self._drop_space = True
        self.reasoning_spans.append((self._stream.num_bytes_read, None))

    def reasoning(self, text: str) -> None:
        text = self._trim(text)
        if text:
            self._deltas.append(ReasoningDelta(text))

    def end_reasoning(self, num_bytes_since: int = 0) -> None:
        """The reasoning ended `num_bytes_since` before the current position."""
        begin, _ = self.reasoning_spans[-1]
        self.reasoning_spans[-1] = (begin, self._stream.num_bytes_read - num_bytes_since)
        self._in_reasoning = False
        self._take_space()
        self._drop_space = True

    def start_call(self, name: str, call_id: str | None = None) -> None:
        if self._only is not None and name not in self._only:
            raise Malformed(f"there is no tool {name!r}")
        self._space_before_call = self._take_space()
        self._drop_space = True
        self._in_call = True
        self._deltas.append(ToolCallStart(self.next_index, call_id or self._new_call_id(), name))
        self.next_index += 1

    def arguments(self, text: str) -> None:
        assert self._in_call
        if text:
            self._deltas.append(ToolCallArguments(self.next_index - 1, text))

    def end_call(self) -> None:
        self._in_call = False
        self._deltas.append(ToolCallEnd(self.next_index - 1))
        self._stream.record()  # malformed text from here on does not undo the call

    def fail(self, text: str, why: str | None) -> None:
        """`text` is not a call. Logs the first `why` of an output, if given."""
        if why is not None and not self._warned:
            self._warned = True
            logger.warning("a malformed tool call is passed on as text (%s): %.80r", why, text)
        if not self._in_call:
            self.content(text)
            return
        self._in_call = False
        self._drop_space = False
        self._deltas.append(ToolCallBroken(self.next_index - 1, self._space_before_call + text))

    def trial(self, stream: TextStream, only: Collection[str]) -> Emitter:
        """An emitter for calls that count only once they are adopted."""
        return Emitter(stream, self._new_call_id, self.next_index, only)

    def adopt(self, trial: Emitter, num_bytes: int) -> None:
        """Add the complete calls of `trial`, if any.

        They are not part of the reasoning, of which they are the last `num_bytes`. The reasoning
        continues after them.
        """
        ends = [at for at, delta in enumerate(trial._deltas) if isinstance(delta, ToolCallEnd)]
        if not ends:
            return
        self.end_reasoning(num_bytes)
        self._deltas += trial._deltas[: ends[-1] + 1]
        self.next_index += len(ends)
        self.begin_reasoning()

    def _take_space(self) -> str:
        """The white space held back, if it belongs to the message."""
        space = "" if self._drop_space else "".join(self._space)
        self._space = []
        return space

    def _trim(self, text: str) -> str:
        """`text` after the space held back, without its trailing space, which is held back now."""
        if self._drop_space:
            text = text.lstrip()
        kept = text.rstrip()
        if kept:
            text, space = self._take_space() + kept, text[len(kept) :]
            self._space = [space]
            self._drop_space = False
            return text
        if text:
            self._space.append(text)
        return ""


def _joined(deltas: list[Delta]) -> list[Delta]:
    """Join adjacent pieces of the same item."""
    joined: list[Delta] = []
    for kind, group in groupby(deltas, type):
        pieces = list(group)
        text = "".join(getattr(piece, "text", "") for piece in pieces)
        if kind is ContentDelta:
            joined.append(ContentDelta(text))
        elif kind is ReasoningDelta:
            joined.append(ReasoningDelta(text))
        elif isinstance(pieces[0], ToolCallArguments):
            joined.append(ToolCallArguments(pieces[0].index, text))
        else:
            joined += pieces
    return joined
