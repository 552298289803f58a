"""OutputGrammar: decides which tokens may come next in one output: reasoning, then the grammar."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.protocol.errors import InputError, RequestFault
from penstock.protocol.structured import FIELD
from penstock.structured.backend import Bits, GrammarBackend, Matcher
from penstock.structured.reasoning import Phase, Reasoning, State

ALL_TOKENS = -1  # every bit of an int32


class Misfit(RequestFault):
    """A token that the grammar forbids."""

    def __init__(self, token_id: int) -> None:
        super().__init__(f"structured_outputs failed: token {token_id} has no place in the grammar")
        self.token_id = token_id


class OutputGrammar:
    """Follows the tokens of one output: its `reasoning`, then its answer.

    Without a `matcher` the answer is free. With a matcher the reasoning may be optional: then the
    output begins either with the token `start_id` or directly with the answer. With a matcher, a
    token of `end_ids` is forbidden during the reasoning, because the answer must still follow. A
    token that ends the reasoning is an exception.
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
        self.field = field  # the client's name for the grammar
        self.drafts: list[int] = []  # draft tokens for the next step
        self._reasoning = reasoning
        self._start_id = start_id
        self._withheld: list[int] = []
        if reasoning is not None and matcher is not None:
            self._withheld = [i for i in end_ids if not reasoning.is_ended_by(i)]
        self._state = State(Phase.OVER) if reasoning is None else reasoning.begin()
        self._took_answer = False  # whether the matcher accepted the last token

    @property
    def is_free(self) -> bool:
        """Whether any token may come next."""
        if self._state.phase is Phase.OVER or self._may_begin_answer:
            return self.matcher is None
        return not self._withheld and self._state.phase not in (Phase.OPENING, Phase.CLOSING)

    @property
    def is_answer(self) -> bool:
        """Whether the matcher alone decides what may come next."""
        return self._state.phase is Phase.OVER and self.matcher is not None

    @property
    def is_complete(self) -> bool:
        return self.matcher is not None and self.is_answer and self.matcher.is_complete

    @property
    def fault(self) -> InputError | None:
        """Why the matcher cannot continue, or None."""
        error = None if self.matcher is None else self.matcher.error
        return None if error is None else InputError(f"{self.field} failed: {error}", self.field)

    def accept(self, token_ids: Sequence[int]) -> int | None:
        """Accept sampled tokens. Returns how many of them complete the output, or None.

        If the grammar forbids a token, raises `fault` if there is one, else `Misfit`.
        """
        for count, token_id in enumerate(token_ids, start=1):
            if not self._take(token_id):
                raise self.fault or Misfit(token_id)
            if self.is_complete:
                return count
        return None

    def fill_with_drafts(self, backend: GrammarBackend, bits: Bits) -> None:
        """Fill one row per position: the next token, and the token after each draft.

        Rows after a forbidden draft allow all tokens, because that draft will be rejected. So do
        rows after the end of the output, because their tokens are dropped.
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
                break  # nothing may follow, and a complete matcher need not fill a mask
        if num_taken and self.matcher is not None:
            self.matcher.rollback(num_taken)
        self._state = before

    @property
    def _may_begin_answer(self) -> bool:
        """Whether either reasoning or the answer may come next."""
        return self._state.phase is Phase.BEFORE and self._start_id is not None

    def _fill(self, backend: GrammarBackend, bits: Bits) -> None:
        """Fill one row. All of its bits must be set."""
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
    """Clear a token's bit in the single row."""
    words = bits.view("uint32")
    words[0, token_id // 32] &= ~(1 << (token_id % 32)) & 0xFFFFFFFF


def _allow(bits: Bits, token_id: int) -> None:
    """Set a token's bit in the single row."""
    words = bits.view("uint32")
    words[0, token_id // 32] |= 1 << (token_id % 32)
