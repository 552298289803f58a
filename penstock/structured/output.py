"""OutputGrammar: one request's output, held to its grammar from the end of the reasoning on."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.protocol.errors import InputError, RequestFault
from penstock.protocol.structured import FIELD
from penstock.structured.backend import Bits, GrammarBackend, Matcher
from penstock.structured.reasoning import Phase, Reasoning, State

ALL_TOKENS = -1  # every bit of an int32


class Misfit(RequestFault):
    """A token that has no place in the grammar."""

    def __init__(self, token_id: int) -> None:
        super().__init__(f"structured_outputs failed: token {token_id} has no place in the grammar")
        self.token_id = token_id


class OutputGrammar:
    """Follows the tokens of one output: its `reasoning`, and then its answer.

    Without a `matcher` the answer is free. With one, and where the reasoning may be left out, the
    output either begins with the token `start_id` or is the answer from its first token on. Then
    `end_ids`, the tokens that end an output, do not end it within the reasoning: the answer has yet
    to come.
    """

    def __init__(
        self,
        matcher: Matcher | None,
        reasoning: Reasoning | None = None,
        start_id: int | None = None,
        field: str = FIELD,
        end_ids: Sequence[int] = (),
    ) -> None:
        self.matcher = matcher
        self.field = field  # what the client calls the grammar
        self.drafts: list[int] = []  # tokens that are proposed to come next
        self._reasoning = reasoning
        self._start_id = start_id
        self._withheld: list[int] = []
        if reasoning is not None and matcher is not None:
            self._withheld = [i for i in end_ids if not reasoning.is_ended_by(i)]
        self._state = State(Phase.OVER) if reasoning is None else reasoning.begin()
        self._took_answer = False  # whether the last token was the matcher's

    @property
    def is_free(self) -> bool:
        """Whether any token may come next."""
        if self._state.phase is Phase.OVER or self._may_begin_answer:
            return self.matcher is None
        return not self._withheld and self._state.phase not in (Phase.OPENING, Phase.CLOSING)

    @property
    def is_answer(self) -> bool:
        """Whether the matcher alone says what may come next."""
        return self._state.phase is Phase.OVER and self.matcher is not None

    @property
    def is_complete(self) -> bool:
        return self.matcher is not None and self.is_answer and self.matcher.is_complete

    @property
    def fault(self) -> InputError | None:
        """Why this output can go on no more, if so: the grammar leads nowhere, or to too much."""
        error = None if self.matcher is None else self.matcher.error
        return None if error is None else InputError(f"{self.field} failed: {error}", self.field)

    def accept(self, token_ids: Sequence[int]) -> int | None:
        """Take tokens that were sampled: with how many of them the output is complete.

        None: more must come. Raises `Misfit` for a token that has no place in the grammar, and
        what its `fault` is if there is one.
        """
        for count, token_id in enumerate(token_ids, start=1):
            if not self._take(token_id):
                raise self.fault or Misfit(token_id)
            if self.is_complete:
                return count
        return None

    def fill_with_drafts(self, backend: GrammarBackend, bits: Bits) -> None:
        """Fill one row for each position: the next token, and the one after each draft.

        Rows behind a draft that the grammar refuses are free, since that draft will not hold; so
        are those behind the end, whose tokens nobody gets.
        """
        bits[:] = ALL_TOKENS
        before, num_taken = self._state, 0
        for row in range(len(bits)):
            self._fill(backend, bits[row : row + 1])
            if row == len(bits) - 1 or row >= len(self.drafts):
                break
            if not self._take(self.drafts[row]):
                break
            num_taken += self._took_answer
            if self.is_complete:
                break  # nothing follows, and a matcher need not say what might
        if num_taken and self.matcher is not None:
            self.matcher.rollback(num_taken)
        self._state = before

    @property
    def _may_begin_answer(self) -> bool:
        """Whether reasoning may come next, or the answer without any."""
        return self._state.phase is Phase.BEFORE and self._start_id is not None

    def _fill(self, backend: GrammarBackend, bits: Bits) -> None:
        """Fill one row, all of whose bits are set."""
        if self.is_free:
            return
        forced = None if self._reasoning is None else self._reasoning.forced(self._state)
        if forced is not None:
            bits[:] = 0
            _allow(bits, forced)
            return
        if self._state.phase is not Phase.OVER and not self._may_begin_answer:
            for token_id in self._withheld:
                _forbid(bits, token_id)
            return
        assert self.matcher is not None
        backend.fill([self.matcher], bits)
        if self._may_begin_answer:
            assert self._start_id is not None
            _allow(bits, self._start_id)

    def _take(self, token_id: int) -> bool:
        if self._may_begin_answer and token_id != self._start_id:
            self._state = State(Phase.OVER)
        self._took_answer = self.is_answer
        if self._state.phase is Phase.OVER:
            return self.matcher is None or self.matcher.accept(token_id)
        assert self._reasoning is not None
        self._state = self._reasoning.after(self._state, token_id)
        return True


def _forbid(bits: Bits, token_id: int) -> None:
    """Clear one token's bit in the one row."""
    words = bits.view("uint32")
    words[0, token_id // 32] &= ~(1 << (token_id % 32)) & 0xFFFFFFFF


def _allow(bits: Bits, token_id: int) -> None:
    """Set one token's bit in the one row."""
    words = bits.view("uint32")
    words[0, token_id // 32] |= 1 << (token_id % 32)
