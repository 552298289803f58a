"""tool_choice required: whatever a model samples under the grammar, its parser finds calls in."""

from __future__ import annotations

import json
import random
from functools import cache

import numpy as np
import pytest
from real_tokenizers import real_templates, real_tokenizer
from replay import feed_tokens, make_parser

from penstock.structured.backend import GrammarBackend, make_backend
from penstock.structured.tags import params_for_calls
from penstock.structured.vocabulary import Vocabulary, read_vocabulary
from penstock.text.parsing.deltas import collect
from penstock.text.parsing.formats import Tool
from penstock.text.parsing.parser import TOOL_PARSERS, call_grammar

CITIES, DAYS = ["Paris", 'Saint-"Jean"', "東京"], [1, 2, 30]
TOOLS = [
    Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {"city": {"enum": CITIES}, "days": {"enum": DAYS}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    ),
    Tool("now"),
]
MODELS = {
    "deepseek_v3": "deepseek_v3", "glm45": "glm4_5", "granite": "glm4_5", "hermes": "qwen3",
    "json": "qwen3", "kimi_k2": "deepseek_v3_1", "llama3_json": "llama3_2",
    "minimax_m2": "gpt_oss", "mistral": "mistral_nemo", "openai": "gpt_oss",
    "pythonic": "llama3_2", "qwen3_coder": "qwen3",
}  # fmt: skip


@cache
def backend_for(model: str) -> tuple[GrammarBackend, Vocabulary]:
    tokenizer = real_tokenizer(model)
    end = tokenizer.encode("<|endoftext|>", add_special_tokens=False)
    ends = [] if tokenizer.end_ids else [end[0] if len(end) == 1 else 0]
    vocabulary = read_vocabulary(tokenizer, tokenizer.vocab_size, ends)
    backend = make_backend(
        "llguidance", vocabulary, lambda text: tokenizer.encode(text, add_special_tokens=False)
    )
    return backend, vocabulary


def sample(tools: str, parallel: bool, seed: int) -> list[int]:
    """Tokens chosen at random among those that the grammar allows."""
    model = MODELS[tools]
    tokenizer = real_tokenizer(model)
    backend, vocabulary = backend_for(model)
    special = {vocabulary.tokens[token_id].decode() for token_id in vocabulary.special_ids}
    template = real_templates(model).get("default", "")
    grammar = call_grammar(tools, TOOLS, parallel, template)
    params = params_for_calls(grammar, lambda name: name in special)
    matcher = backend.compile(backend.lower(params)).matcher()
    choose = random.Random(seed)
    bits = np.zeros((1, -(-len(vocabulary) // 32)), dtype=np.int32)
    token_ids: list[int] = []
    while not matcher.is_complete:
        assert len(token_ids) < 500
        backend.fill([matcher], bits)
        assert matcher.error is None
        flags = np.unpackbits(bits.view(np.uint8), count=len(vocabulary), bitorder="little")
        allowed = np.flatnonzero(flags).tolist()
        if any(token_id in allowed for token_id in vocabulary.end_ids) and choose.random() < 0.5:
            break
        written = [i for i in allowed if i not in vocabulary.end_ids]
        dense = [i for i in written if not tokenizer.token_text(i).isspace()]
        token_ids.append(choose.choice(dense or written))
        assert matcher.accept(token_ids[-1])
    return token_ids


@pytest.mark.parametrize("tools", TOOL_PARSERS)
@pytest.mark.parametrize(("parallel", "seed"), [(True, 0), (True, 1), (False, 2)])
def test_what_the_grammar_allows_is_read_as_calls(tools: str, parallel: bool, seed: int) -> None:
    tokenizer = real_tokenizer(MODELS[tools])
    token_ids = sample(tools, parallel, seed)
    parser = make_parser(None, tools, TOOLS, enforced=True)
    message = collect(feed_tokens(parser, tokenizer, [[token_id] for token_id in token_ids]))
    assert message.content == ""
    assert len(message.tool_calls) >= 1
    assert parallel or len(message.tool_calls) == 1
    for call in message.tool_calls:
        assert call.complete
        arguments = json.loads(call.arguments)
        if call.name == "now":
            assert arguments == {}
        else:
            assert call.name == "get_weather"
            assert set(arguments) == {"city", "days"}
            assert arguments["city"] in CITIES
            assert arguments["days"] in DAYS


def test_special_tokens_after_a_hole_in_the_vocabulary_are_known() -> None:
    """GPT-4o's ids leave some out before its last special tokens."""
    tokenizer = real_tokenizer("gpt_oss")
    (token_id,) = tokenizer.encode("<|call|>", add_special_tokens=False)
    vocabulary = read_vocabulary(tokenizer, tokenizer.vocab_size, [token_id])
    assert b"" in vocabulary.tokens
    assert vocabulary.tokens[token_id] == b"<|call|>"
    assert token_id in vocabulary.special_ids
    assert vocabulary.end_ids == [token_id]
