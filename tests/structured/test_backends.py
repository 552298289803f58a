"""Both backends: what they accept, what they mask, and that they can go back."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from penstock.protocol.errors import InputError
from penstock.protocol.structured import StructuredOutputsParams as Structured
from penstock.structured.backend import GrammarBackend, Matcher
from penstock.structured.llguidance_backend import GuidanceBackend
from penstock.structured.output import OutputGrammar
from penstock.structured.reasoning import Reasoning
from penstock.structured.tags import call_structure
from penstock.structured.vocabulary import Vocabulary
from penstock.text.parsing.formats import CallGrammar, CallShape
from penstock.text.tokenizer import Tokenizer

END = 2
ARITHMETIC_LARK = """
start: sum
sum: product (("+" | "-") product)*
product: atom (("*" | "/") atom)*
atom: NUMBER | "(" sum ")"
NUMBER: /[0-9]+/
"""
ARITHMETIC_EBNF = """
root ::= product (("+" | "-") product)*
product ::= atom (("*" | "/") atom)*
atom ::= [0-9]+ | "(" root ")"
"""
OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "triggers": ["<f="],
    "structures": [
        {"begin": "<f=one>", "schema": OBJECT, "end": "</f>"},
        {"begin": "<f=two>", "schema": {"type": "boolean"}, "end": "</f>"},
    ],
}
CALLS = CallGrammar(
    begin="<call>[",
    calls=(
        CallShape("f", '{"name": "f", "arguments": ', OBJECT, "}"),
        CallShape("g", '{"name": "g", "arguments": ', {"type": "object"}, "}"),
    ),
    separator=", ",
    end="]",
    parallel=True,
    special=("<call>", "<absent>"),
)


def special(name: str) -> bool:
    return name == "<call>"


# What to match; texts that match as a whole; texts that fail on the way or are not all there is.
Case = tuple[dict[str, Any], list[str], list[str]]  # what is asked for, and right and wrong texts
CASES: list[Case] = [
    ({"json": OBJECT}, ['{"a": 1}', '{"a":-7,"b":"é😀"}'], ['{"b": "x"}', "[]", '{"a": 1.5}']),
    ({"json_object": True}, ["{}", '{"x": [1, null]}'], ["[]", "1"]),
    ({"regex": r"\d{3}-[a-zé]+x"}, ["123-abcx", "000-éx"], ["12-ax", "123-AX"]),
    ({"choice": ["yes", "no", 'say "no"', "日本"]}, ["no", 'say "no"', "日本"], ["nope", "日"]),
    ({"choice": ["a", "ab", "abc", "a\nb"]}, ["a", "ab", "abc", "a\nb"], ["b", "a\n", "abcd"]),
    ({"choice": [f"x{i}" for i in range(10_000)]}, ["x7", "x77", "x9999"], ["x", "x10000"]),
    ({"grammar": ARITHMETIC_LARK}, ["(1+22)*3", "7"], ["(1", "1+", "a"]),
    ({"grammar": ARITHMETIC_EBNF}, ["(1+22)*3", "7"], ["(1", "1+", "a"]),
    (
        {"structural_tag": TAG},
        ["free text", 'so: <f=one>{"a": 1}</f> and <f=two>true</f>', "<f=two>false</f>"],
        ["<f=three>", "<f=two>maybe</f>"],
    ),
    (
        {"structural_tag": call_structure(CALLS, special)},
        [
            '<call>[{"name": "f", "arguments": {"a": 1}}]',
            '<call>[{"name": "g", "arguments": {}}, {"name": "f", "arguments": {"a": 2}}]',
        ],
        ['[{"name": "f"', '<call>[{"name": "h"', '<call>[{"name": "f", "arguments": {"b"', "x"],
    ),
]  # fmt: skip


def matcher_for(backend: GrammarBackend, **spec: Any) -> Matcher:
    return backend.compile(backend.lower(Structured(**spec))).matcher()


def allowed(backend: GrammarBackend, matcher: Matcher, vocabulary: Vocabulary) -> set[int]:
    bits = np.zeros((1, -(-len(vocabulary) // 32)), dtype=np.int32)
    backend.fill([matcher], bits)
    assert matcher.error is None
    flags = np.unpackbits(bits.view(np.uint8), count=len(vocabulary), bitorder="little")
    assert not any(flags[i] for i, token in enumerate(vocabulary.tokens) if not token)
    return set(np.flatnonzero(flags).tolist())


def feed(
    backend: GrammarBackend, matcher: Matcher, vocabulary: Vocabulary, token_ids: list[int]
) -> int:
    """How many tokens the matcher takes; masks agree with it at every one."""
    for count, token_id in enumerate(token_ids):
        mask = allowed(backend, matcher, vocabulary)
        # A mask may say less than `accept` takes: text that has to come is asked for in one way.
        accepted = matcher.accept(token_id)
        if token_id in mask:
            assert accepted
        if not accepted:
            return count
    return len(token_ids)


def ends(backend: GrammarBackend, matcher: Matcher, vocabulary: Vocabulary) -> bool:
    """Whether the output may end here."""
    return matcher.is_complete or END in allowed(backend, matcher, vocabulary)


every_case = pytest.mark.parametrize("case", CASES, ids=[next(iter(c[0])) for c in CASES])


@every_case
def test_what_matches_passes_and_what_does_not_is_stopped(
    backend: GrammarBackend, vocabulary: Vocabulary, tokenizer: Tokenizer, case: Case
) -> None:
    spec, right, wrong = case
    grammar = backend.compile(backend.lower(Structured(**spec)))
    for text in right:
        matcher, token_ids = grammar.matcher(), tokenizer.encode(text, add_special_tokens=False)
        assert feed(backend, matcher, vocabulary, token_ids) == len(token_ids), text
        assert ends(backend, matcher, vocabulary), text
    for text in wrong:
        matcher, token_ids = grammar.matcher(), tokenizer.encode(text, add_special_tokens=False)
        passed = feed(backend, matcher, vocabulary, token_ids) == len(token_ids)
        assert not (passed and ends(backend, matcher, vocabulary)), text


@every_case
def test_going_back_forgets_the_way(
    backend: GrammarBackend, vocabulary: Vocabulary, tokenizer: Tokenizer, case: Case
) -> None:
    """Back from a detour, masks are those of a matcher that never went there."""
    spec, right, _ = case
    grammar = backend.compile(backend.lower(Structured(**spec)))
    rng = random.Random(1)
    for text in right:
        straight, winding = grammar.matcher(), grammar.matcher()
        for token_id in tokenizer.encode(text, add_special_tokens=False):
            steps = 0
            while steps < 3 and not winding.is_complete:
                detour = rng.choice(sorted(allowed(backend, winding, vocabulary)))
                assert winding.accept(detour)
                steps += 1
            if steps:
                winding.rollback(steps)
            before = allowed(backend, straight, vocabulary)
            assert allowed(backend, winding, vocabulary) == before
            assert straight.accept(token_id)
            assert winding.accept(token_id)
        assert straight.is_complete == winding.is_complete


def test_random_outputs_always_find_an_end(backend: GrammarBackend, vocabulary: Vocabulary) -> None:
    """A matcher that is not complete always allows a token, and takes it."""
    spec = {"json": {"type": "array", "items": {"enum": [2, "é", None, True]}, "maxItems": 3}}
    grammar = backend.compile(backend.lower(Structured(**spec, disable_any_whitespace=True)))
    for seed in range(20):
        rng, matcher, output = random.Random(seed), grammar.matcher(), []
        while not matcher.is_complete:
            token_id = rng.choice(sorted(allowed(backend, matcher, vocabulary)))
            assert matcher.accept(token_id)
            output.append(vocabulary.tokens[token_id])
            assert len(output) < 40
        items = json.loads(b"".join(output))
        assert set(items) <= {2, "é", None, True}
        assert len(items) <= 3


def test_a_string_never_holds_special_tokens(
    backend: GrammarBackend, vocabulary: Vocabulary
) -> None:
    matcher = matcher_for(backend, regex=r"(.|\n)*")
    free = allowed(backend, matcher, vocabulary)
    assert not free & set(vocabulary.special_ids) - {END}
    matcher = matcher_for(backend, json={"type": "string"})
    assert matcher.accept(vocabulary.tokens.index(b'"'))
    assert not allowed(backend, matcher, vocabulary) & set(vocabulary.special_ids)


def test_half_a_character_is_followed_by_its_other_half(
    backend: GrammarBackend, vocabulary: Vocabulary
) -> None:
    matcher = matcher_for(backend, regex="(é|ê){2}")
    first, second = "é".encode()[:1], {"é".encode()[1:], "ê".encode()[1:]}
    for _ in range(2):
        assert allowed(backend, matcher, vocabulary) == {vocabulary.tokens.index(first)}
        assert matcher.accept(vocabulary.tokens.index(first))
        expected = {vocabulary.tokens.index(half) for half in second}
        assert allowed(backend, matcher, vocabulary) == expected
        assert matcher.accept(min(expected))
    assert matcher.is_complete


@pytest.mark.parametrize(
    "spec",
    [
        {"json": "{"},
        {"json": "[1]"},
        {"json": {"type": "strong"}},
        {"json": {"$ref": "#/nowhere"}},
        {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
        {"regex": "(a"},
        {"regex": "a{5,2}"},
        {"grammar": "root ::= missing"},
        {"grammar": "start: missing"},
        {"structural_tag": {"type": "x"}},
        {"structural_tag": {"type": "structural_tag", "format": {"type": "write"}}},
    ],
    ids=str,
)
def test_what_is_wrong_is_refused(backend: GrammarBackend, spec: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="structured_outputs") as caught:
        backend.compile(backend.lower(Structured(**spec)))
    assert caught.value.field == "structured_outputs"


def test_objects_are_held_to_what_their_schema_names_unless_it_is_asked_for_more(
    backend: GrammarBackend, vocabulary: Vocabulary, tokenizer: Tokenizer
) -> None:
    schema = {
        "type": "object",
        "properties": {"in": {"type": "array", "items": {"type": "object", "properties": {}}}},
    }
    text = tokenizer.encode('{"in":[{"x":1}],"y":2}', add_special_tokens=False)
    free = matcher_for(backend, json=schema, disable_additional_properties=False)
    assert feed(backend, free, vocabulary, text) == len(text)
    held = matcher_for(backend, json=schema)
    assert feed(backend, held, vocabulary, text) < len(text)
    form = {"type": "json_schema", "json_schema": schema}
    tag = matcher_for(backend, structural_tag={"type": "structural_tag", "format": form})
    assert feed(backend, tag, vocabulary, text) < len(text)
    open_map = {"type": "object", "properties": {"in": {"type": "array"}, "y": {"type": "integer"}}}
    assert feed(backend, matcher_for(backend, json=open_map), vocabulary, text) == len(text)


def test_an_object_that_two_schemas_describe_has_what_either_names(
    backend: GrammarBackend, vocabulary: Vocabulary, tokenizer: Tokenizer
) -> None:
    named = [
        {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
        for name in ("a", "b")
    ]
    inherited = {"$defs": {"base": named[0]}, "allOf": [{"$ref": "#/$defs/base"}], **named[1]}
    for schema in ({"allOf": named}, inherited):
        whole = tokenizer.encode('{"a":1,"b":2}', add_special_tokens=False)
        other = tokenizer.encode('{"a":1,"b":2,"c":3}', add_special_tokens=False)
        matcher = matcher_for(backend, json=schema)
        assert feed(backend, matcher, vocabulary, whole) == len(whole)
        assert ends(backend, matcher, vocabulary)
        matcher = matcher_for(backend, json=schema)
        if isinstance(backend, GuidanceBackend):  # xgrammar knows allOf of one schema only
            assert feed(backend, matcher, vocabulary, other) < len(other)


def test_white_space_can_be_forbidden_and_never_goes_on_forever(
    backend: GrammarBackend, vocabulary: Vocabulary, tokenizer: Tokenizer
) -> None:
    spaced = tokenizer.encode('{ "a" : 1 }', add_special_tokens=False)
    assert feed(backend, matcher_for(backend, json=OBJECT), vocabulary, spaced) == len(spaced)
    tight = matcher_for(backend, json=OBJECT, disable_any_whitespace=True)
    assert feed(backend, tight, vocabulary, spaced) == 1
    endless = tokenizer.encode("{" + " " * 50, add_special_tokens=False)
    assert feed(backend, matcher_for(backend, json=OBJECT), vocabulary, endless) < 30


def test_rows_for_drafts_follow_them_as_far_as_they_go(
    backend: GrammarBackend, vocabulary: Vocabulary, tokenizer: Tokenizer
) -> None:
    def rows_of(text: str, drafts: str, marker: bytes = b"") -> list[set[int]]:
        reasoning = Reasoning(vocabulary.tokens, ends=(marker,)) if marker else None
        output = OutputGrammar(matcher_for(backend, regex="[ab][0-9]c|z"), reasoning)
        output.accept(tokenizer.encode(text, add_special_tokens=False))
        output.drafts = tokenizer.encode(drafts, add_special_tokens=False)
        bits = np.zeros((4, -(-len(vocabulary) // 32)), dtype=np.int32)
        for _ in range(2):  # it leaves no trace
            output.fill_with_drafts(backend, bits)
        flags = np.unpackbits(bits.view(np.uint8), axis=1, count=len(vocabulary), bitorder="little")
        return [set(np.flatnonzero(row).tolist()) for row in flags]

    def ids(text: str) -> set[int]:
        return set(tokenizer.encode(text, add_special_tokens=False))

    everything = set(range(len(vocabulary)))
    assert rows_of("", "a5c")[:3] == [ids("abz"), ids("0123456789"), ids("c")]
    assert rows_of("", "5ac") == [ids("abz"), everything, everything, everything]
    assert rows_of("a", "5c9")[:2] == [ids("0123456789"), ids("c")]
    assert rows_of("xy", "|b7", marker=b"|")[:3] == [everything, ids("abz"), ids("0123456789")]


def test_drafts_may_go_on_behind_the_end(
    backend: GrammarBackend, tokenizer: Tokenizer, vocabulary: Vocabulary
) -> None:
    matcher = backend.compile(backend.lower(Structured(regex="[a-z]*"))).matcher()
    output = OutputGrammar(matcher)
    (letter,) = tokenizer.encode("q", add_special_tokens=False)
    end = vocabulary.end_ids[0]
    output.drafts = [letter, end, letter]
    bits = np.zeros((4, -(-len(vocabulary) // 32)), dtype=np.int32)
    for _ in range(2):  # it leaves no trace
        output.fill_with_drafts(backend, bits)
    assert (bits[0] == bits[1]).all()
    assert output.fault is None
    assert output.accept([letter]) is None
    assert output.accept([letter, end]) == 2
