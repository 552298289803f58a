"""OutputGrammar: one request's output, held to its grammar from the end of the reasoning on."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.protocol.errors import RequestFault
from penstock.structured.backend import Backend, Bits, Matcher

ALL_TOKENS = -1  # every bit of an int32


class Misfit(RequestFault):
    """A token that has no place in the grammar."""

    def __init__(self, token_id: int) -> None:
        super().__init__(f"structured_outputs failed: token {token_id} has no place in the grammar")
        self.token_id = token_id


class OutputGrammar:
    """Follows the tokens of one output.

    Until `marker` has appeared, tokens are free. What a token holds behind the marker's end
    belongs to the reasoning too.
    """

    def __init__(self, matcher: Matcher, tokens: Sequence[bytes], marker: bytes = b"") -> None:
        self.matcher = matcher
        self.drafts: list[int] = []  # tokens that are proposed to come next
        self._tokens = tokens
        self._marker = marker
        self._tail: bytes | None = b"" if marker else None  # of the reasoning; None: it is over

    @property
    def is_reasoning(self) -> bool:
        return self._tail is not None

    @property
    def is_complete(self) -> bool:
        return self._tail is None and self.matcher.is_complete

    def accept(self, token_ids: Sequence[int]) -> int | None:
        """Take tokens that were sampled: with how many of them the output is complete.

        None: more must come. Raises `RequestFault` for a token that has no place in the grammar.
        """
        for count, token_id in enumerate(token_ids, start=1):
            if not self._take(token_id):
                if self.matcher.error is not None:
                    raise RequestFault(f"structured_outputs failed: {self.matcher.error}")
                raise Misfit(token_id)
            if self.is_complete:
                return count
        return None

    def fill_with_drafts(self, backend: Backend, bits: Bits) -> None:
        """Fill one row for each position: the next token, and the one after each draft.

        Rows behind a draft that the grammar refuses are free: that draft will not hold.
        """
        bits[:] = ALL_TOKENS
        before, num_taken = self._tail, 0
        for row in range(len(bits)):
            if self._tail is None:
                backend.fill([self.matcher], bits[row : row + 1])
            if row == len(bits) - 1 or row >= len(self.drafts):
                break
            was_reasoning = self.is_reasoning
            if self.is_complete or not self._take(self.drafts[row]):
                break
            num_taken += not was_reasoning
        if num_taken:
            self.matcher.rollback(num_taken)
        self._tail = before

    def _take(self, token_id: int) -> bool:
        if self._tail is None:
            return self.matcher.accept(token_id)
        self._tail += self._tokens[token_id]
        if self._marker in self._tail:
            self._tail = None
        else:
            self._tail = self._tail[-len(self._marker) :]
        return True
