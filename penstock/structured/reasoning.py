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
    OPENING = 0  # it is being begun
    BEFORE = 1  # not known yet whether there will be any
    THINKING = 2
    CLOSING = 3  # it is being brought to its end
    OVER = 4


class State(NamedTuple):
    phase: Phase
    tail: bytes = b""  # of the text, as much as could be the beginning of a marker
    num_tokens: int = 0  # of the reasoning, its opening or its closing


@dataclass(frozen=True)
class Reasoning:
    """How one output's reasoning begins and ends.

    `tokens` are the bytes of each token. The output begins within the reasoning, after `opening`,
    which is forced; with `starts`, there is none unless it begins with one of these. It ends at the
    first of `ends`; after `budget` tokens of it, `closing` is forced. Where a token goes on behind
    the end, the rest of that token is reasoning, too.
    """

    tokens: Sequence[bytes]
    ends: tuple[bytes, ...]
    starts: tuple[bytes, ...] = ()
    budget: int | None = None
    opening: tuple[int, ...] = ()
    closing: tuple[int, ...] = ()
    closes_at_end: bool = False  # forces no more of `closing` than it takes to write an end

    def begin(self) -> State:
        if self.opening:
            return State(Phase.OPENING)
        return State(Phase.BEFORE) if self.starts else self._thinking(b"", 0)

    def after(self, state: State, token_id: int) -> State:
        text = state.tail + self.tokens[token_id]
        match state.phase:
            case Phase.OPENING:
                if state.num_tokens + 1 == len(self.opening):
                    return self._thinking(b"", 0)
                return State(Phase.OPENING, b"", state.num_tokens + 1)
            case Phase.BEFORE:
                text = text.lstrip()
                if any(start in text for start in self.starts):
                    return self._thinking(b"", 0)
                may_come = any(start.startswith(text) for start in self.starts)
                return State(Phase.BEFORE if may_come else Phase.OVER, text)
            case Phase.THINKING:
                if self._has_ended(text):
                    return State(Phase.OVER)
                return self._thinking(self._tail(text), state.num_tokens + 1)
            case Phase.CLOSING:
                is_closed = self.closes_at_end and self._has_ended(text)
                if is_closed or state.num_tokens + 1 == len(self.closing):
                    return State(Phase.OVER)
                return State(Phase.CLOSING, self._tail(text), state.num_tokens + 1)
        return state

    def forced(self, state: State) -> int | None:
        """The only token that may come next; None: any may."""
        if state.phase is Phase.OPENING:
            return self.opening[state.num_tokens]
        return self.closing[state.num_tokens] if state.phase is Phase.CLOSING else None

    def is_ended_by(self, token_id: int) -> bool:
        """Whether this token alone ends it."""
        return self._has_ended(self.tokens[token_id])

    def _has_ended(self, text: bytes) -> bool:
        return any(end in text for end in self.ends)

    def _tail(self, text: bytes) -> bytes:
        return text[-max(map(len, self.ends)) :]

    def _thinking(self, tail: bytes, num_tokens: int) -> State:
        if self.budget is None or num_tokens < self.budget or self._is_within(tail):
            return State(Phase.THINKING, tail, num_tokens)
        return State(Phase.CLOSING)

    def _is_within(self, tail: bytes) -> bool:
        """Whether `tail` ends within a character, or within what may become an end's marker."""
        for end in self.ends:
            if any(tail.endswith(end[:size]) for size in range(1, len(end))):
                return True
        for size in (1, 2, 3):
            lead = tail[-size] if len(tail) >= size else 0
            if lead >= 0xC0:  # the first byte of a character of 2, 3 or 4 bytes
                return size < (2 if lead < 0xE0 else 3 if lead < 0xF0 else 4)
        return False
