"""The tokenizer that `LLM.get_tokenizer` returns is used like Hugging Face's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tiny_tokenizers import byte_level_backend
from transformers import PreTrainedTokenizerFast

from penstock.protocol.errors import InputError
from penstock.text.renderers.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer
from penstock.text.user_tokenizer import UserTokenizer

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
TEXT = "Hello, the cat</s> sat"


@pytest.fixture(scope="module")
def ours() -> UserTokenizer:
    template = ChatTemplate({"default": TEMPLATE}, NAMES)
    frontend: Any = SimpleNamespace(render_chat=template.render, renderer=template)
    backend = byte_level_backend()
    tokenizer = UserTokenizer(Tokenizer(backend, NAMES), frontend)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@pytest.fixture(scope="module")
def theirs() -> Any:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_backend(), chat_template=TEMPLATE, **NAMES
    )
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def test_texts_are_encoded_and_decoded_as_by_hugging_face(ours: UserTokenizer, theirs: Any) -> None:
    ids = theirs.encode(TEXT)
    assert ours.encode(TEXT) == ids
    assert ours(TEXT).input_ids == ours(TEXT)["input_ids"] == ids
    assert ours([TEXT, "a"]) == dict(theirs([TEXT, "a"], return_token_type_ids=False))
    assert ours.batch_decode([ids]) == theirs.batch_decode([ids])
    for skipped in ({}, {"skip_special_tokens": True}):
        assert ours.decode(ids, **skipped) == theirs.decode(ids, **skipped)
    assert ours.decode(ids[0]) == theirs.decode(ids[0])


def test_tokens_have_hugging_faces_names(ours: UserTokenizer, theirs: Any) -> None:
    assert ours.tokenize(TEXT) == theirs.tokenize(TEXT)
    ids = theirs.encode(TEXT)
    assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    assert ours.convert_ids_to_tokens(1) == "</s>"
    assert ours.convert_tokens_to_ids("</s>") == theirs.convert_tokens_to_ids("</s>")
    assert ours.convert_tokens_to_ids(["<s>", "</s>"]) == [0, 1]
    assert ours.get_vocab() == theirs.get_vocab()
    assert len(ours) == len(theirs)
    assert (ours.eos_token, ours.eos_token_id) == (theirs.eos_token, theirs.eos_token_id)
    assert ours.all_special_ids == sorted(theirs.all_special_ids)


def test_conversations_are_rendered_as_by_hugging_face(ours: UserTokenizer, theirs: Any) -> None:
    messages = [{"role": "user", "content": "the cat"}]
    for added in (False, True):
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=added)
        assert (
            ours.apply_chat_template(messages, tokenize=False, add_generation_prompt=added) == text
        )
    ids = theirs.apply_chat_template(messages, return_dict=False)
    assert ours.apply_chat_template(messages) == ids
    encoding = ours.apply_chat_template(messages, return_dict=True)
    assert isinstance(encoding, dict)
    assert encoding["input_ids"] == ids


def test_what_it_does_not_have_is_an_attribute_error(ours: UserTokenizer) -> None:
    with pytest.raises(AttributeError):
        ours.push_to_hub  # noqa: B018
    with pytest.raises(AttributeError):
        ours("a").token_type_ids  # noqa: B018


TEXTS = [TEXT, "a", "the cat sat, and the cat sat on"]
LENGTHS: list[dict[str, Any]] = [
    {"padding": True},
    {"padding": "longest", "truncation": True, "max_length": 4},
    {"padding": "max_length", "max_length": 40},
    {"padding": "max_length", "max_length": 3},
    {"padding": "max_length"},
    {"truncation": True},
    {"truncation": True, "max_length": 3},
    {"truncation": "only_first", "max_length": 3},
    {"max_length": 3},
    {"truncation": False, "max_length": 3},
    {"truncation": True, "max_length": 3, "add_special_tokens": False},
]


@pytest.mark.parametrize("options", LENGTHS, ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_are_cut_and_padded_as_by_hugging_face(
    ours: UserTokenizer, theirs: Any, options: dict[str, Any], side: str
) -> None:
    for each in (ours, theirs):
        each.padding_side = each.truncation_side = side
    assert ours(TEXTS, **options) == dict(theirs(TEXTS, return_token_type_ids=False, **options))
    assert ours(TEXT, **options) == dict(theirs(TEXT, return_token_type_ids=False, **options))
    assert ours.encode(TEXT, **options) == theirs.encode(TEXT, **options)
    assert ours(TEXTS) == dict(theirs(TEXTS, return_token_type_ids=False)), "a call alone"


@pytest.mark.parametrize("kind", ["pt", "np"])
def test_tensors_are_those_of_hugging_face(ours: UserTokenizer, theirs: Any, kind: str) -> None:
    for given, options in ((TEXT, {}), (TEXTS, {"padding": True})):
        found = ours(given, return_tensors=kind, **options)
        expected = theirs(given, return_tensors=kind, **options)
        for name in ("input_ids", "attention_mask"):
            assert type(found[name]) is type(expected[name])
            assert found[name].dtype == expected[name].dtype
            assert found[name].tolist() == expected[name].tolist()
    with pytest.raises(InputError, match="texts of different lengths make no tensor: set padding"):
        ours(TEXTS, return_tensors=kind)


def test_special_tokens_have_hugging_faces_attributes(ours: UserTokenizer, theirs: Any) -> None:
    for name in ("pad_token", "pad_token_id", "bos_token_id", "unk_token_id", "chat_template",
                 "special_tokens_map", "model_max_length"):  # fmt: skip
        assert getattr(ours, name) == getattr(theirs, name), name
    assert sorted(ours.all_special_tokens) == sorted(theirs.all_special_tokens)
    tokens = theirs.tokenize(TEXT)
    assert ours.convert_tokens_to_string(tokens) == theirs.convert_tokens_to_string(tokens)


def test_several_conversations_are_rendered_at_once(ours: UserTokenizer, theirs: Any) -> None:
    two = [[{"role": "user", "content": text}] for text in ("the cat", "a")]
    for options in (
        {"tokenize": False},
        {"return_dict": False},
        {"return_dict": True, "padding": True},
        {"return_dict": False, "truncation": True, "max_length": 4},
    ):
        assert ours.apply_chat_template(two, **options) == theirs.apply_chat_template(
            two, **options
        )
    found = ours.apply_chat_template(two, padding=True, return_tensors="pt")
    expected = theirs.apply_chat_template(two, padding=True, return_tensors="pt", return_dict=False)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"return_offsets_mapping": True},
            "return_offsets_mapping is not supported here: use tran",
        ),
        ({"text_pair": "b"}, "text_pair is not supported here"),
        ({"return_tensors": "tf"}, "return_tensors must be one of pt, np, got 'tf'"),
        ({"padding": "left"}, "padding must be True, longest or max_length, got 'left'"),
        ({"truncation": "only_second", "max_length": 2}, "truncation must be True, longest_first"),
    ],
)
def test_what_hugging_face_does_besides_is_refused(
    ours: UserTokenizer, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        ours(TEXT, **options)


def test_padding_without_a_pad_token_says_how_to_choose_one() -> None:
    frontend: Any = SimpleNamespace()
    bare = UserTokenizer(Tokenizer(byte_level_backend(), NAMES), frontend)
    with pytest.raises(InputError, match="set tokenizer"):
        bare(TEXTS, padding=True)
