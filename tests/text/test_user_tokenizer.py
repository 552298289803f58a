"""The tokenizer that `LLM.get_tokenizer` returns is used like Hugging Face's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tiny_tokenizers import byte_level_backend
from transformers import PreTrainedTokenizerFast

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
    frontend: Any = SimpleNamespace(render_chat=template.render)
    return UserTokenizer(Tokenizer(byte_level_backend(), NAMES), frontend)


@pytest.fixture(scope="module")
def theirs() -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level_backend(), chat_template=TEMPLATE, **NAMES
    )


def test_texts_are_encoded_and_decoded_as_by_hugging_face(ours: UserTokenizer, theirs: Any) -> None:
    ids = theirs.encode(TEXT)
    assert ours.encode(TEXT) == ids
    assert ours(TEXT).input_ids == ours(TEXT)["input_ids"] == ids
    assert ours([TEXT, "a"]) == dict(theirs([TEXT, "a"], return_token_type_ids=False))
    assert ours.batch_decode([ids]) == theirs.batch_decode([ids])
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


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
