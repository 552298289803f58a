"""Reasoning: decides where the reasoning before an answer begins and ends. Its text is free.

The state is a pure function of the output's tokens: `after` maps a state and a token to the next
state. So drafts, preemption and replay need no special handling.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Phase(enum.Enum):
    OPENING = 0  # the opening tokens are being forced
    BEFORE = 1  # it is not known yet whether there will be reasoning
    THINKING = 2
    CLOSING = 3  # the closing tokens are being forced
    OVER = 4


class State(NamedTuple):
    phase: Phase
    tail: bytes = b""  # the end of the text, where a marker may begin
    num_tokens: int = 0  # in this phase


@dataclass(frozen=True)
class Reasoning:
    """How one output's reasoning begins and ends.

    `tokens` are the bytes of each token. The output begins inside the reasoning, after `opening`,
    which is forced. With `starts`, there is reasoning only if the output begins with one of them.
    Reasoning ends at the first of `ends`. After `budget` tokens, `closing` is forced. If a token
    continues after the end marker, the rest of the token counts as reasoning.
    """

    tokens: Sequence[bytes]
    ends: tuple[bytes, ...]
    starts: tuple[bytes, ...] = ()
    budget: int | None = None
    opening: tuple[int, ...] = ()
    closing: tuple[int, ...] = ()
    closes_at_end: bool = False  # stops forcing `closing` once an end marker is written

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
        """The only token that may come next, or None if any may."""
        if state.phase is Phase.OPENING:
            return self.opening[state.num_tokens]
        return self.closing[state.num_tokens] if state.phase is Phase.CLOSING else None

    def is_ended_by(self, token_id: int) -> bool:
        """Whether this token alone ends the reasoning."""
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
        """Whether `tail` ends inside a character or inside a possible end marker."""
        for end in self.ends:
            if any(tail.endswith(end[:size]) for size in range(1, len(end))):
                return True
        for size in (1, 2, 3):
            lead = tail[-size] if len(tail) >= size else 0
            if lead >= 0xC0:  # the first byte of a character of 2, 3 or 4 bytes
                return size < (2 if lead < 0xE0 else 3 if lead < 0xF0 else 4)
        return False
