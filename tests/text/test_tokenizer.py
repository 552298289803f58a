"""Encoding and decoding equal `transformers`' for the same folder."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import byte_level_backend, sentencepiece_like_backend, word_backend
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from penstock.protocol.errors import InputError, ModelError
from penstock.text.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_folder

TEXTS = [
    "",
    "Hello, world!",
    "  two  spaces ",
    "naïve café €5 😀👩‍👩‍👧",
    "a<|end|>b <|start|>user",
    "line\n\n\tbreak",
    "<s>hello</s> <extra>x",
]


def save(folder: Path, backend: Backend, config: dict[str, Any], **files: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def framed(backend: Backend) -> Backend:
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[(t, backend.token_to_id(t)) for t in ("<s>", "</s>")],
    )
    return backend


def token_fields(content: str, **fields: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"content": content, "special": True, **flags, **fields}


FOLDERS: dict[str, Any] = {
    "plain": lambda: (byte_level_backend(), {}, {}),
    "framed by its post-processor": lambda: (
        framed(byte_level_backend()),
        {"bos_token": "<s>", "eos_token": "</s>"},
        {},
    ),
    "add_bos_token without a post-processor": lambda: (
        byte_level_backend(),
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True},
        {},
    ),
    "add_bos_token off, yet framed": lambda: (
        framed(byte_level_backend()),
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False},
        {},
    ),
    "tokens that only the configuration knows": lambda: (
        byte_level_backend(),
        {
            "bos_token": "<|start|>",
            "eos_token": {"content": "<|end|>", "__type": "AddedToken", **token_fields("<|end|>")},
            "added_tokens_decoder": {
                "400": token_fields("<|end|>", rstrip=True),
                "399": token_fields("<|start|>"),
                "401": token_fields("<extra>", special=False),
            },
        },
        {},
    ),
    "special tokens in a file of their own": lambda: (
        byte_level_backend(),
        {},
        {
            "special_tokens_map": {
                "bos_token": "<s>",
                "eos_token": token_fields("<|end|>"),
                "additional_special_tokens": ["<extra>"],
            }
        },
    ),
    "truncation and padding in the file": lambda: (truncating(), {}, {}),
    "byte fallback": lambda: (sentencepiece_like_backend(), {"bos_token": "<s>"}, {}),
}


def truncating() -> Backend:
    backend = byte_level_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=8, pad_id=0, pad_token="<s>")
    return backend


@pytest.mark.parametrize("case", FOLDERS)
def test_encoding_and_decoding_equal_transformers_for_the_same_folder(
    case: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    backend, config, files = FOLDERS[case]()
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    folder = save(tmp_path, backend, config, **files)
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    ours = tokenizer_from_folder(folder)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        plain = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == plain
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@given(st.lists(st.integers(0, 299), max_size=40))
def test_byte_level_decoding_equals_the_library_for_any_tokens(ids: list[int]) -> None:
    backend = byte_level_backend()
    assert Tokenizer(backend).decode(ids) == backend.decode(ids)


@given(st.text(max_size=40))
def test_byte_fallback_decoding_equals_the_library_for_any_text(text: str) -> None:
    backend = sentencepiece_like_backend()
    ids = backend.encode(text).ids
    assert Tokenizer(backend).decode(ids) == backend.decode(ids)


def test_a_valid_character_survives_an_invalid_byte_beside_it() -> None:
    backend = sentencepiece_like_backend()
    ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in "€".encode() + b"\xff"]
    assert Tokenizer(backend).decode(ids) == "€\ufffd"


def test_an_added_token_decodes_to_its_own_text_whatever_its_characters() -> None:
    backend = byte_level_backend()
    backend.add_tokens([AddedToken("ééé", normalized=False)])
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode(tokenizer.encode("x ééé y")) == "x ééé y"


def test_token_text_keeps_spaces_and_shows_special_tokens() -> None:
    for backend in (byte_level_backend(), sentencepiece_like_backend()):
        tokenizer = Tokenizer(backend)
        first, *rest = tokenizer.encode(" the cat")
        joined = "".join(tokenizer.token_text(i) for i in (first, *rest))
        assert joined.lstrip() == "the cat"
        assert tokenizer.token_text(backend.token_to_id("<s>")) == "<s>"


def test_ids_beyond_the_vocabulary_decode_to_nothing() -> None:
    for backend in (byte_level_backend(), word_backend()):
        assert Tokenizer(backend).decode([10_000]) == ""


def test_a_lone_surrogate_is_refused_with_its_position() -> None:
    with pytest.raises(InputError, match="position 2"):
        Tokenizer(byte_level_backend()).encode("ab\ud800")


def test_a_missing_tokenizer_names_the_file_and_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"tokenizer\.json.*tokenizer\.model.*tokenizer=") as error:
        tokenizer_from_folder(tmp_path)
    assert "skip_tokenizer_init" in str(error.value)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {"type": "Unheard"}}'])
def test_a_corrupt_tokenizer_names_the_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json.*tokenizer="):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"added_tokens_decoder": {"x": 1}}'])
def test_a_corrupt_configuration_names_the_file(tmp_path: Path, content: str) -> None:
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelError, match=str(tmp_path)):
        tokenizer_from_folder(tmp_path)


def test_another_folder_may_bring_the_tokenizer(tmp_path: Path) -> None:
    from types import SimpleNamespace

    folder = save(tmp_path / "other", byte_level_backend(), {"eos_token": "</s>"})
    source: Any = SimpleNamespace(path=tmp_path, kind="folder", gguf=None)
    assert load_tokenizer(source, str(folder)).eos_token_id is not None
    with pytest.raises(ModelError, match="nowhere"):
        load_tokenizer(source, "nowhere")


def test_words_joined_by_the_library_decode_too() -> None:
    tokenizer = Tokenizer(word_backend())
    assert tokenizer.decode(tokenizer.encode("the cat sat")) == "the cat sat"


def test_unknown_decoders_are_left_to_the_library() -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode(tokenizer.encode("play playing")) == "play playing"


def test_a_long_text_does_not_stop_other_threads() -> None:
    tokenizer = Tokenizer(byte_level_backend())

    def turns_beside() -> int:
        """How often another thread had its turn meanwhile."""
        is_running, num_turns = threading.Event(), 0

        def encode() -> int:
            is_running.set()
            return len(tokenizer.encode("a long text, " * 50_000))

        with ThreadPoolExecutor(1) as threads:
            encoding = threads.submit(encode)
            is_running.wait()
            while not encoding.done():
                time.sleep(0.001)
                num_turns += 1
            assert encoding.result() > 50_000
        return num_turns

    # On a busy machine there may be few, but not each time.
    assert any(turns_beside() > 5 for _ in range(20)), "a web server would have answered nobody"


@given(st.text(max_size=300))
def test_a_text_has_no_fewer_tokens_than_its_length_says(text: str) -> None:
    for tokenizer in (Tokenizer(byte_level_backend()), Tokenizer(sentencepiece_like_backend())):
        num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
        assert tokenizer.fewest_tokens(text) <= num_tokens
