"""Vocabulary: the bytes of every token, and which tokens are special. Grammars read it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:  # the process that checks grammars needs none of it
    from penstock.text.tokenizer import Tokenizer


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """Serializable: the confined process gets a copy."""

    tokens: list[bytes]  # by id; b"" for padding ids
    special_ids: list[int]  # tokens that are not text; their bytes are their names
    end_ids: list[int]  # tokens that end an output

    def __len__(self) -> int:
        return len(self.tokens)

    def special_id(self, name: str) -> int | None:
        """The id of the special token with this name, or None."""
        spelled = name.encode()
        return next((i for i in self.special_ids if self.tokens[i] == spelled), None)

    def token_id(self, text: str) -> int | None:
        """The id of the token with this text, special or not, or None."""
        special, spelled = self.special_id(text), text.encode()
        if special is not None or spelled not in self.tokens:
            return special
        return self.tokens.index(spelled)


def read_vocabulary(tokenizer: Tokenizer, size: int, end_ids: Iterable[int]) -> Vocabulary:
    """Read a tokenizer's vocabulary. Takes a fraction of a second if it is large.

    `size` is the model's vocabulary size (its number of logits). `end_ids` are added to the
    tokenizer's.
    """
    known = min(size, tokenizer.vocab_size)
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(known)]
    return Vocabulary(
        tokens=tokens + [b""] * (size - known),
        special_ids=sorted(token_id for token_id in tokenizer.special_ids if token_id < known),
        end_ids=sorted({i for i in (*end_ids, *tokenizer.end_ids) if 0 <= i < known}),
    )
