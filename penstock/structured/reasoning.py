"""Reasoning: the part of an output before the answer, which is free, but may be limited in length.

Where an output stands is a pure function of its tokens: a state is a value, `after` makes the
next one of it, and nothing else is remembered. So drafts, preemption and replay need no care.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Phase(enum.Enum):
    BEFORE = 0  # not known yet whether there will be any
    THINKING = 1
    CLOSING = 2  # it is being brought to its end
    OVER = 3


class State(NamedTuple):
    phase: Phase
    tail: bytes = b""  # of the text, as much as could be the beginning of a marker
    num_tokens: int = 0  # of the reasoning, or of its closing


@dataclass(frozen=True)
class Reasoning:
    """How one output's reasoning begins and ends.

    `tokens` are the bytes of each token. The output begins within the reasoning if `start` is
    empty, else there is none unless it begins with `start`. It ends at `end`; after `budget`
    tokens of it, `closing` is forced. What a token holds behind the end belongs to it, too.
    """

    tokens: Sequence[bytes]
    end: bytes
    start: bytes = b""
    budget: int | None = None
    closing: tuple[int, ...] = ()
    closes_at_end: bool = False  # forces no more of `closing` than it takes to write `end`

    def begin(self) -> State:
        return State(Phase.BEFORE) if self.start else self._thinking(b"", 0)

    def after(self, state: State, token_id: int) -> State:
        text = state.tail + self.tokens[token_id]
        match state.phase:
            case Phase.BEFORE:
                text = text.lstrip()
                if self.start in text:
                    return self._thinking(b"", 0)
                return State(Phase.BEFORE if self.start.startswith(text) else Phase.OVER, text)
            case Phase.THINKING:
                if self.end in text:
                    return State(Phase.OVER)
                return self._thinking(text[-len(self.end) :], state.num_tokens + 1)
            case Phase.CLOSING:
                is_closed = self.closes_at_end and self.end in text
                if is_closed or state.num_tokens + 1 == len(self.closing):
                    return State(Phase.OVER)
                return State(Phase.CLOSING, text[-len(self.end) :], state.num_tokens + 1)
        return state

    def forced(self, state: State) -> int | None:
        """The only token that may come next; None: any may."""
        return self.closing[state.num_tokens] if state.phase is Phase.CLOSING else None

    def _thinking(self, tail: bytes, num_tokens: int) -> State:
        if self.budget is None or num_tokens < self.budget or self._is_within(tail):
            return State(Phase.THINKING, tail, num_tokens)
        return State(Phase.CLOSING)

    def _is_within(self, tail: bytes) -> bool:
        """Whether `tail` ends within a character, or within what may become the end's marker."""
        if any(tail.endswith(self.end[:size]) for size in range(1, len(self.end))):
            return True
        for size in (1, 2, 3):
            lead = tail[-size] if len(tail) >= size else 0
            if lead >= 0xC0:  # the first byte of a character of 2, 3 or 4 bytes
                return size < (2 if lead < 0xE0 else 3 if lead < 0xF0 else 4)
        return False
