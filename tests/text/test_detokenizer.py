"""Incremental text equals the text of all tokens, whatever the chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import byte_level_backend, sentencepiece_like_backend, word_backend
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from penstock.text.detokenizer import MAX_HELD_TOKENS, ByteDetokenizer, WindowDetokenizer
from penstock.text.tokenizer import Tokenizer


def word_piece_backend() -> Backend:
    vocabulary = {"[UNK]": 0, "play": 1, "##ing": 2, "do": 3, "##n't": 4, ",": 5}
    backend = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    return backend


TOKENIZERS = [
    Tokenizer(make())
    for make in (byte_level_backend, sentencepiece_like_backend, word_backend, word_piece_backend)
]
tokenizers = st.sampled_from(TOKENIZERS)


def chunked(draw: Callable[..., Any], items: list[int]) -> list[list[int]]:
    cuts = sorted(draw(st.lists(st.integers(0, len(items)), max_size=8)))
    return [items[a:b] for a, b in zip([0, *cuts], [*cuts, len(items)], strict=True)]


@st.composite
def streams(draw: Callable[..., Any]) -> tuple[Tokenizer, list[list[int]]]:
    """Chunks of the tokens of a text, or of any tokens at all (ids without a token included)."""
    tokenizer = draw(tokenizers)
    from_text = st.text(max_size=30).map(lambda text: tokenizer.encode(text))
    random_ids = st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30)
    return tokenizer, chunked(draw, draw(st.one_of(from_text, random_ids)))


@given(streams(), st.booleans())
def test_pieces_add_up_to_the_text_of_all_tokens(
    stream: tuple[Tokenizer, list[list[int]]], skip_special_tokens: bool
) -> None:
    tokenizer, chunks = stream
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
    pieces = [detokenizer.add(chunk) for chunk in chunks] + [detokenizer.flush()]
    whole = tokenizer.decode([i for chunk in chunks for i in chunk], skip_special_tokens)
    assert "".join(pieces) == whole


@given(st.text(max_size=30), st.sampled_from(TOKENIZERS[:2]))
def test_half_a_character_is_never_given_out(text: str, tokenizer: Tokenizer) -> None:
    text = text.replace("\ufffd", "")
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    shown = ""
    for token_id in tokenizer.encode(text):
        shown += detokenizer.add([token_id])
        assert text.lstrip().startswith(shown.lstrip())
        assert "\ufffd" not in shown


@given(streams(), st.data())
def test_a_replay_goes_on_exactly_where_the_delivered_tokens_ended(
    stream: tuple[Tokenizer, list[list[int]]], data: st.DataObject
) -> None:
    tokenizer, chunks = stream
    ids = [i for chunk in chunks for i in chunk]
    cut = data.draw(st.integers(0, len(ids)))
    original, replayed = tokenizer.detokenizer(), tokenizer.detokenizer()
    for token_id in ids[:cut]:
        original.add([token_id])
    replayed.add(ids[:cut])
    assert original.add(ids[cut:]) == replayed.add(ids[cut:])
    assert original.flush() == replayed.flush()


def test_the_text_after_a_prompt_keeps_its_leading_space() -> None:
    tokenizer = Tokenizer(sentencepiece_like_backend())
    prompt, output = tokenizer.encode("the"), tokenizer.encode("cat")
    assert tokenizer.detokenizer().add(output) == "cat"
    assert tokenizer.detokenizer(prompt).add(output) == " cat"
    only_special = [next(iter(tokenizer.special_ids))]
    assert tokenizer.detokenizer(only_special).add(output) == "cat"


def test_words_after_a_prompt_keep_the_space_between() -> None:
    tokenizer = Tokenizer(word_backend())
    assert tokenizer.detokenizer(tokenizer.encode("the")).add(tokenizer.encode("cat")) == " cat"


def test_no_more_than_three_bytes_are_held_back() -> None:
    """The work on a token and the state between tokens are bounded: linear in the output."""
    tokenizer = Tokenizer(byte_level_backend())
    detokenizer = tokenizer.detokenizer()
    assert isinstance(detokenizer, ByteDetokenizer)
    invalid = [2 + byte for byte in (0xF0, 0x9F, 0x98, 0xE2, 0x82, 0xFF)]
    for token_id in invalid * 50:
        detokenizer.add([token_id])
        held, _ = detokenizer._utf8.getstate()
        assert len(held) <= 3


def test_other_decoders_see_a_bounded_window_for_each_token() -> None:
    class Counting:
        """A decoder that never completes a character, and counts what it is asked."""

        longest = 0

        def id_to_token(self, token_id: int) -> str:
            return str(token_id)

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            self.longest = max(self.longest, len(ids))
            return "\ufffd" * len(ids)

    backend: Any = Counting()
    detokenizer = WindowDetokenizer(backend)
    text = "".join(detokenizer.add([i]) for i in range(1000)) + detokenizer.flush()
    assert text == "\ufffd" * 1000
    assert backend.longest == 1 + MAX_HELD_TOKENS


@pytest.mark.parametrize("tokenizer", TOKENIZERS[:2])
def test_special_tokens_inside_a_character_do_not_break_it(tokenizer: Tokenizer) -> None:
    spell = {tokenizer._bytes[i]: i for i in range(3, 259)}  # type: ignore[index]
    first, *rest = (spell[bytes([byte])] for byte in "€".encode())
    special = next(iter(tokenizer.special_ids))
    assert tokenizer.detokenizer().add([first, special, *rest]) == "€"
