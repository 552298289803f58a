"""The vocabulary as grammars see it: the bytes of every token, and which are no text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:  # the process that checks grammars needs none of it
    from penstock.text.tokenizer import Tokenizer


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """Serializable: the process that checks grammars gets a copy."""

    tokens: list[bytes]  # by id; b"" where there is none, as in a padded vocabulary
    special_ids: list[int]  # tokens that no text spells; their bytes are their names
    end_ids: list[int]  # tokens that end an output

    def __len__(self) -> int:
        return len(self.tokens)

    def special_id(self, name: str) -> int | None:
        """The special token of this name."""
        spelled = name.encode()
        return next((i for i in self.special_ids if self.tokens[i] == spelled), None)

    def token_id(self, text: str) -> int | None:
        """The token that is written like this, special or not."""
        special, spelled = self.special_id(text), text.encode()
        if special is not None or spelled not in self.tokens:
            return special
        return self.tokens.index(spelled)


def read_vocabulary(tokenizer: Tokenizer, size: int, end_ids: Iterable[int]) -> Vocabulary:
    """`size` is the model's own: how many logits it gives. `end_ids` are added to the tokenizer's.

    Takes a part of a second for a large vocabulary.
    """
    known = min(size, tokenizer.vocab_size)
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(known)]
    return Vocabulary(
        tokens=tokens + [b""] * (size - known),
        special_ids=sorted(token_id for token_id in tokenizer.special_ids if token_id < known),
        end_ids=sorted({i for i in (*end_ids, *tokenizer.end_ids) if 0 <= i < known}),
    )
