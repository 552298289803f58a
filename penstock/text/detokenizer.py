"""Incremental detokenization: whole characters only, in time linear in the output.

Most vocabularies spell bytes: the text is the concatenated bytes of the tokens, decoded as UTF-8
with U+FFFD for invalid bytes. `ByteDetokenizer` holds back at most the three bytes of an unfinished
character. `WindowDetokenizer` serves other decoders (word pieces, words). It decodes a window of a
few tokens, never the whole output.
"""

from __future__ import annotations

import codecs
import itertools
import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import tokenizers

REPLACEMENT = "\ufffd"
MAX_HELD_TOKENS = 4  # no character has more bytes, so more tokens cannot complete it
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer(Protocol):
    def add(self, token_ids: Iterable[int]) -> str:
        """The text that became certain with these tokens."""

    def flush(self) -> str:
        """The text held back. No tokens may follow."""


@dataclass
class ByteVocabulary:
    """The bytes of each token, looked up once."""

    backend: tokenizers.Tokenizer
    byte_level: bool  # GPT-2's alphabet; else SentencePiece's, with ▁ and <0xNN>
    num_stripped_spaces: int = 0  # leading spaces removed from a text, once
    literal_ids: frozenset[int] = frozenset()  # added tokens of a byte-level vocabulary
    _known: dict[int, bytes] = field(default_factory=dict)
    _byte_of: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.byte_level:
            self._byte_of = byte_level_alphabet()

    def __getitem__(self, token_id: int) -> bytes:
        spelled = self._known.get(token_id)
        if spelled is None:
            spelled = self._known[token_id] = self._spell(token_id)
        return spelled

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of all tokens at once."""
        text = b"".join(self[token_id] for token_id in token_ids).decode("utf-8", "replace")
        return _strip_spaces(text, self.num_stripped_spaces)

    def _spell(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id)
        if token is None:  # ids of a padded vocabulary without a token
            return b""
        if self.byte_level:
            if token_id in self.literal_ids or not all(char in self._byte_of for char in token):
                return token.encode()
            return bytes(self._byte_of[char] for char in token)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace("▁", " ").encode()


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte: itself if printable, else from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


def byte_vocabulary(backend: tokenizers.Tokenizer) -> ByteVocabulary | None:
    """The bytes of `backend`'s tokens, or None if its decoder does not spell bytes."""
    if backend.decoder is None:
        return None
    steps = _flatten(json.loads(backend.decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        literal = frozenset(backend.get_added_tokens_decoder())
        return ByteVocabulary(backend, byte_level=True, literal_ids=literal)
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or kinds[3:] not in ([], ["Strip"]):
        return None
    if steps[0]["pattern"] != {"String": "▁"} or steps[0]["content"] != " ":
        return None
    strip: dict[str, Any] = steps[3] if kinds[3:] else {"content": " ", "start": 0, "stop": 0}
    if strip["content"] != " " or strip["stop"] != 0:
        return None
    return ByteVocabulary(backend, byte_level=False, num_stripped_spaces=strip["start"])


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flatten(inner)]


def _strip_spaces(text: str, most: int) -> str:
    stripped = text.lstrip(" ")
    return text[min(most, len(text) - len(stripped)) :]


class ByteDetokenizer:
    """For vocabularies that spell bytes. `context` precedes the text, such as a prompt."""

    def __init__(
        self,
        vocabulary: ByteVocabulary,
        hidden_ids: Collection[int] = (),
        context: Sequence[int] = (),
    ) -> None:
        self._vocabulary = vocabulary
        self._hidden_ids = hidden_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_to_strip = vocabulary.num_stripped_spaces
        if self._num_to_strip and any(token_id not in hidden_ids for token_id in context):
            self._num_to_strip = 0

    def add(self, token_ids: Iterable[int]) -> str:
        shown = [token_id for token_id in token_ids if token_id not in self._hidden_ids]
        spelled = b"".join(map(self._vocabulary.__getitem__, shown))
        text = self._utf8.decode(spelled)
        return self._strip(text) if self._num_to_strip else text

    def flush(self) -> str:
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if not self._num_to_strip or not text:
            return text
        stripped = _strip_spaces(text, self._num_to_strip)
        self._num_to_strip -= len(text) - len(stripped)
        if stripped:
            self._num_to_strip = 0
        return stripped


class WindowDetokenizer:
    """For other decoders, whose output for a token depends only on its neighbours.

    Each token is decoded with the one before it, and with at most `MAX_HELD_TOKENS` that are held
    back because they end in the middle of a character.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        hidden_ids: Collection[int] = (),
        context: Sequence[int] = (),
    ) -> None:
        self._backend = backend
        self._hidden_ids = hidden_ids
        shown = (token_id for token_id in reversed(context) if self._shows(token_id))
        self._before = list(itertools.islice(shown, 1))
        self._held: list[int] = []

    def add(self, token_ids: Iterable[int]) -> str:
        return "".join(self._add_one(token_id) for token_id in token_ids if self._shows(token_id))

    def flush(self) -> str:
        text = self._new_text()
        self._held = []
        return text

    def _shows(self, token_id: int) -> bool:
        """False for hidden tokens, and for ids of a padded vocabulary without a token."""
        return token_id not in self._hidden_ids and self._backend.id_to_token(token_id) is not None

    def _add_one(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._held) < MAX_HELD_TOKENS:
            return ""
        self._before, self._held = self._held[-1:], []
        return text

    def _new_text(self) -> str:
        if not self._held:
            return ""
        before = self._backend.decode(self._before, skip_special_tokens=False)
        return str(
            self._backend.decode(self._before + self._held, skip_special_tokens=False)[
                len(before) :
            ]
        )
