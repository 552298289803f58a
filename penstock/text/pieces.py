"""Cuts a long text so that its pieces have the same tokens as the whole.

The library needs hundreds of bytes per token while it works, so it gets a long text in pieces. A
text is cut before a space or line break that follows another character, on two conditions:

- No token of the vocabulary contains the two characters, so the model itself (BPE, Unigram, words)
  never joins the two sides.
- The tokenizer gives the surroundings of the cut the same tokens in two parts as in one, so the
  normalizer, the pre-tokenizer and the added tokens allow the cut. Some normalizers put a space
  before every text. In that case the second part omits its own.

Without such a place, a piece grows until there is one. If it would exceed `MAX_PIECE_LENGTH`, it is
the rest of the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

Encode = Callable[[str], list[int]]

PIECE_LENGTH = 64 * 1024  # characters
MAX_PIECE_LENGTH = 2**20  # characters searched for a cut
SURROUNDINGS = 128  # characters compared on each side of a cut
SEARCHED = 4096  # characters searched at a time
MAX_TRIES = 4  # cuts tried in each
_SPACE, _BREAK = " ▁Ġ", "\nĊ"  # as vocabularies spell them
_BLANKS = _SPACE + _BREAK + "\tĉ\rč"


class Cuts:
    """Finds cuts in texts of one tokenizer, whose tokens are spelled as in `vocabulary`."""

    def __init__(self, encode: Encode, vocabulary: Iterable[str]) -> None:
        self._encode = encode
        before: dict[str, set[str]] = {" ": set(), "\n": set()}  # characters before each in tokens
        for token in vocabulary:
            for i in range(1, len(token)):
                if token[i] in _SPACE + _BREAK and token[i - 1] not in _BLANKS:
                    before[" " if token[i] in _SPACE else "\n"].add(token[i - 1])
        patterns = [rf"{_others(chars)}(?={char})" for char, chars in before.items()]
        self._candidates = re.compile("|".join(patterns))

    def pieces(self, text: str) -> Iterator[str]:
        """The text in pieces, to be encoded separately. The last one may be empty."""
        start = 0
        while len(text) - start > PIECE_LENGTH:
            cut = self._find(text, start + PIECE_LENGTH, min(start + MAX_PIECE_LENGTH, len(text)))
            if cut is None:
                break
            end, next_start = cut
            yield text[start:end]
            start = next_start
        yield text[start:]

    def pieces_from_end(self, text: str) -> Iterator[str]:
        """The text in pieces, not necessarily the same, from the last one on."""
        end = len(text)
        while end > PIECE_LENGTH:
            cut = self._find_before(text, end - PIECE_LENGTH, max(end - MAX_PIECE_LENGTH, 0))
            if cut is None:
                break
            yield text[cut[1] : end]
            end = cut[0]
        yield text[:end]

    def _find(self, text: str, start: int, end: int) -> tuple[int, int] | None:
        """The first cut in a range: where a piece ends, and where the next one begins."""
        for position in range(start, end, SEARCHED):
            if (cut := self._try(text, position, min(position + SEARCHED, end))) is not None:
                return cut
        return None

    def _find_before(self, text: str, end: int, start: int) -> tuple[int, int] | None:
        for position in range(end, start, -SEARCHED):
            if (cut := self._try(text, max(position - SEARCHED, start), position)) is not None:
                return cut
        return None

    def _try(self, text: str, start: int, end: int) -> tuple[int, int] | None:
        for number, found in enumerate(self._candidates.finditer(text, start, end)):
            if number == MAX_TRIES:
                break
            cut = found.end()
            before, after = text[max(cut - SURROUNDINGS, 0) : cut], text[cut : cut + SURROUNDINGS]
            if not after.strip():
                continue  # the text after the blanks might matter
            whole, left = self._encode(before + after), self._encode(before)
            if left + self._encode(after) == whole:
                return cut, cut
            if after[0] == " " and left + self._encode(after[1:]) == whole:
                return cut, cut + 1
        return None


def _others(chars: set[str]) -> str:
    """A pattern for characters that are neither blank nor spelled like one of these."""
    if not chars:
        return r"\S"
    ascii_ones = map(chr, range(ord("!"), ord("~") + 1))  # spelled alike in all vocabularies
    return f"[{''.join(re.escape(char) for char in ascii_ones if char not in chars)}]"
