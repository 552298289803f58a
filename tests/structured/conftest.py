"""Models and vocabularies for tests of structured output."""

from __future__ import annotations

import pytest
from byte_model import make_byte_model, make_byte_tokenizer

from penstock.structured.backend import GrammarBackend, make_backend
from penstock.structured.vocabulary import Vocabulary, read_vocabulary
from penstock.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_byte_model(tmp_path_factory.mktemp("byte_model")))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(make_byte_tokenizer(), {"eos_token": "</s>", "bos_token": "<s>"})


@pytest.fixture(scope="session")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return read_vocabulary(tokenizer, tokenizer.vocab_size + 11, [])


@pytest.fixture(scope="session", params=["llguidance", "xgrammar"])
def backend(
    request: pytest.FixtureRequest, vocabulary: Vocabulary, tokenizer: Tokenizer
) -> GrammarBackend:
    return make_backend(
        request.param, vocabulary, lambda text: tokenizer.encode(text, add_special_tokens=False)
    )
