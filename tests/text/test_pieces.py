"""Long texts are tokenized in pieces, and have the tokens that they have as a whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_level_backend, sentencepiece_like_backend, word_backend
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors

from penstock.config import EngineConfig
from penstock.loading.source import resolve_source
from penstock.protocol.errors import InputError
from penstock.text import pieces as pieces_module
from penstock.text import tokenizer as tokenizer_module
from penstock.text.detokenizer import byte_level_alphabet
from penstock.text.gguf_tokenizer import PRE_TOKENIZERS, PreTokenizer
from penstock.text.pieces import Cuts
from penstock.text.tokenizer import Tokenizer, TooManyTokens, load_tokenizer

LENGTH = 24  # of a piece here


def framed() -> tokenizers.Tokenizer:
    backend = byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return backend


def composing() -> tokenizers.Tokenizer:
    backend = byte_level_backend()
    backend.normalizer = normalizers.NFC()
    return backend


def greedy_markers() -> tokenizers.Tokenizer:
    """With added tokens that take blanks beside them, and one that holds a space."""
    backend = byte_level_backend()
    backend.add_tokens(
        [
            AddedToken("<l>", lstrip=True),
            AddedToken("<r>", rstrip=True),
            AddedToken("cat sat", normalized=False),
        ]
    )
    return backend


def metaspace() -> tokenizers.Tokenizer:
    backend = sentencepiece_like_backend()
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return backend


def unsplit() -> tokenizers.Tokenizer:
    """BPE over the whole text, as Gemma has it."""
    backend = sentencepiece_like_backend()
    backend.normalizer = normalizers.Replace(" ", "▁")
    return backend


def stripping() -> tokenizers.Tokenizer:
    """No piece of it is what it is in the whole: nothing may be cut."""
    backend = byte_level_backend()
    backend.normalizer = normalizers.Strip()
    return backend


BACKENDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte level": byte_level_backend,
    "framed": framed,
    "composing": composing,
    "greedy markers": greedy_markers,
    "prepending": sentencepiece_like_backend,
    "metaspace": metaspace,
    "unsplit": unsplit,
    "words": word_backend,
    "stripping": stripping,
}
WORDS = [
    *("the", "cat", "sat", "Hello", "x", "1", ".", "'s", "<s>", "<l>", "<r>"),
    *(" ", "  ", " " * 20, "\n", "\t", " \n ", "\r\n", "\u00a0", "▁"),
    *("é", "e\u0301", "😀", "€", "我"),
]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=60).map("".join)


@pytest.fixture(scope="module")
def default_tokenizer(default_model: str) -> Tokenizer:
    config = EngineConfig()
    return load_tokenizer(resolve_source(config.model, config.load))


@pytest.fixture(autouse=True, scope="module")
def short_pieces() -> object:
    with pytest.MonkeyPatch.context() as patched:
        for module in (pieces_module, tokenizer_module):
            patched.setattr(module, "PIECE_LENGTH", LENGTH)
        patched.setattr(pieces_module, "SEARCHED", 12)
        patched.setattr(pieces_module, "SURROUNDINGS", 16)
        yield


def check_same(tokenizer: Tokenizer, text: str, keep: int) -> None:
    for adds in (False, True):
        whole = tokenizer.encode_piece(text, adds)
        assert tokenizer.encode(text, adds) == whole
        assert tokenizer.encode(text, adds, limit=len(whole)) == whole
        assert tokenizer.fewest_tokens(text) <= len(whole)
        assert tokenizer.encode_part(text, keep, "first", adds) == whole[:keep]
        assert tokenizer.encode_part(text, keep, "last", adds) == whole[-keep:]
        if whole:
            with pytest.raises(TooManyTokens) as caught:
                tokenizer.encode(text, adds, limit=len(whole) - 1)
            assert len(whole) - 1 < caught.value.num_tokens <= len(whole)


@settings(deadline=None, max_examples=60)
@given(text=TEXTS, keep=st.integers(1, 40))
@pytest.mark.parametrize("name", BACKENDS)
def test_pieces_have_the_tokens_of_the_whole(name: str, text: str, keep: int) -> None:
    check_same(TOKENIZERS[name], text, keep)


TOKENIZERS = {name: Tokenizer(make()) for name, make in BACKENDS.items()}


@settings(deadline=None, max_examples=200)
@given(text=TEXTS, keep=st.integers(1, 40))
def test_pieces_of_the_default_model_have_the_tokens_of_the_whole(
    default_tokenizer: Tokenizer, text: str, keep: int
) -> None:
    check_same(default_tokenizer, text, keep)


def split_as(how: PreTokenizer) -> Tokenizer:
    """With the words of a published family. Tokens are bytes, each word's last one marked: which
    words a text is split into shows in its tokens."""
    alphabet = byte_level_alphabet()
    ids = dict(alphabet)
    ids |= {f"{char}</w>": 256 + byte for char, byte in alphabet.items()}
    backend = tokenizers.Tokenizer(models.BPE(ids, [], end_of_word_suffix="</w>"))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in how.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    if how.nfc:
        backend.normalizer = normalizers.NFC()
    return Tokenizer(backend)


FAMILIES = [split_as(how) for how in dict.fromkeys(PRE_TOKENIZERS.values())]


@settings(max_examples=100)
@given(text=TEXTS)
@pytest.mark.parametrize("number", range(len(FAMILIES)))
def test_pieces_have_the_words_of_the_whole_in_every_family(number: int, text: str) -> None:
    tokenizer = FAMILIES[number]
    assert tokenizer.encode(text, False) == tokenizer.encode_piece(text)
    assert tokenizer.encode_part(text, 9, "last", False) == tokenizer.encode_piece(text)[-9:]
    assert len(list(tokenizer._cuts.pieces("the cat sat " * 30))) > 5


def test_real_prose_and_code_are_cut_often(default_tokenizer: Tokenizer) -> None:
    root = Path(__file__).parents[2]
    for path in (root / "README.md", root / "penstock" / "llm.py"):
        text = path.read_text()
        check_same(default_tokenizer, text, 7)
        cuts = list(default_tokenizer._cuts.pieces(text))
        assert len(cuts) > len(text) / (4 * LENGTH)


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "stripping"])
def test_words_are_cut_everywhere_but_where_that_is_not_safe(name: str) -> None:
    text = "the cat sat " * 30
    assert len(list(TOKENIZERS[name]._cuts.pieces(text))) > 5
    assert len(list(TOKENIZERS["stripping"]._cuts.pieces(text))) == 1


def test_a_token_that_spans_a_space_keeps_texts_from_being_cut_there() -> None:
    """Whatever the surroundings look like: merges may reach further."""
    cuts = Cuts(lambda text: list(text.encode()), ["the", "a▁b"])
    assert list(cuts.pieces("a " * 40)) == ["a " * 40]
    assert len(list(cuts.pieces("c " * 40))) > 1


def test_no_more_of_a_text_is_tokenized_than_it_takes_to_know() -> None:
    words, spelled = TOKENIZERS["words"], TOKENIZERS["byte level"]
    seen: list[str] = []

    def encode(piece: str, add_special_tokens: bool) -> list[int]:
        seen.append(piece)
        return words.encode_piece(piece, add_special_tokens)

    with pytest.raises(TooManyTokens, match="at least"):
        words.encode("the cat sat " * 10_000, False, limit=40, encode_piece=encode)
    assert 0 < sum(map(len, seen)) < 40 * 12
    seen.clear()
    words.encode_part("the cat sat " * 10_000, 5, "last", encode_piece=encode)
    assert len(seen) == 1
    seen.clear()
    with pytest.raises(TooManyTokens, match="at least 2000"):  # by its length alone
        spelled.encode("x" * 10_000, False, limit=40, encode_piece=encode)
    assert seen == []


def test_a_long_text_that_cannot_be_framed_is_encoded_elsewhere_as_a_whole() -> None:
    backend = byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(
        single="$A <s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer = Tokenizer(backend)
    text = "the cat sat " * 30
    seen: list[tuple[str, bool]] = []

    def encode(piece: str, add_special_tokens: bool) -> list[int]:
        seen.append((piece, add_special_tokens))
        return tokenizer.encode_piece(piece, add_special_tokens)

    whole = tokenizer.encode_piece(text, True)
    assert tokenizer.encode(text, encode_piece=encode) == whole
    assert tokenizer.encode_part(text, 9, "last", encode_piece=encode) == whole[-9:]
    assert seen == [(text, True)] * 2


def test_cuts_are_looked_for_in_no_more_than_the_longest_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pieces_module, "MAX_PIECE_LENGTH", 4 * LENGTH)
    tried: list[str] = []

    def encode(text: str) -> list[int]:
        tried.append(text)
        return [len(tried)]  # no two parts have the tokens of the whole

    cuts = Cuts(encode, ["the"])
    text = "the cat sat " * 1000
    assert list(cuts.pieces(text)) == [text]
    assert 0 < len(tried) < 4 * LENGTH
    tried.clear()
    assert list(cuts.pieces_from_end(text)) == [text]
    assert 0 < len(tried) < 4 * LENGTH


def test_a_lone_surrogate_is_found_wherever_it_is() -> None:
    text = "the cat sat " * 20 + "\ud800"
    with pytest.raises(InputError, match="at position 240"):
        Tokenizer(byte_level_backend()).encode(text)
