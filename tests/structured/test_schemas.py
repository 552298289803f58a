"""Random and hard JSON schemas on the default model: what is finished, validates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import LLM, SamplingParams, StructuredOutputsParams

Schema = dict[str, Any]
MAX_TOKENS = 48
PROMPT = "Some JSON: "

HARD: list[Schema] = [
    {
        "anyOf": [
            {"type": "integer"},
            {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        ]
    },
    {"oneOf": [{"const": "a"}, {"const": 1}, {"const": None}]},
    {"$ref": "#/$defs/x", "$defs": {"x": {"type": "string", "enum": ["é", "日本", "\\", '"']}}},
    {  # a list that ends somewhere
        "$defs": {
            "list": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/pair"}]},
            "pair": {
                "type": "array",
                "prefixItems": [{"type": "integer"}, {"$ref": "#/$defs/list"}],
                "minItems": 2,
                "items": False,
            },
        },
        "$ref": "#/$defs/list",
    },
    {  # a tree
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"enum": [1, 2]},
                    "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
                },
                "required": ["v"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    {
        "type": "array",
        "items": {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
            "maxItems": 2,
        },
        "minItems": 1,
        "maxItems": 2,
    },
    {"type": "integer", "minimum": -3, "exclusiveMaximum": 12},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    {"type": "number", "minimum": 0.5, "maximum": 0.75},
    {"type": "number", "exclusiveMinimum": -1, "maximum": 1},
    {"type": "string", "minLength": 2, "maxLength": 3},
    {"type": "string", "pattern": "^[A-Z]{2}-\\d{2,3}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "email", "maxLength": 20},
    {"type": ["string", "null", "boolean"], "maxLength": 2},
    {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"const": {"a": [1]}}],
        "items": False,
        "minItems": 2,
    },
    {
        "type": "object",
        "patternProperties": {"^x[0-9]$": {"type": "boolean"}},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    {
        "type": "object",
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9},
        "maxProperties": 2,
    },
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    {
        "allOf": [
            {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]},
            {"properties": {"a": {"enum": [2, 3]}}, "maxProperties": 1},
        ]
    },
    {"const": {"nested": ['quote " and \\ slash', 1.5, None, {"é": False}]}},
    {"enum": [[1, [2]], {"a": {}}, "", 0, -0.5]},
]


def leaves() -> st.SearchStrategy[Schema]:
    small = st.integers(-50, 50)
    spans = st.tuples(small, small).map(sorted)
    # Some control characters, and planes without any character, are not in the vocabulary.
    characters = st.characters(codec="utf-8", max_codepoint=0x1FFFF, exclude_categories=["Cc"])
    texts = st.text(characters, max_size=4)
    values = st.one_of(texts, small, st.booleans(), st.none())
    return st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.just({"type": "integer"}),
        spans.map(lambda s: {"type": "integer", "minimum": s[0], "maximum": s[1]}),
        spans.map(lambda s: {"type": "number", "minimum": s[0] / 4, "maximum": s[1] / 4 + 1}),
        st.integers(0, 3).map(lambda n: {"type": "string", "minLength": n, "maxLength": n + 3}),
        st.sampled_from(["[a-c]{1,3}", "^x?[0-9]+$", "é|€"]).map(
            lambda pattern: {"type": "string", "pattern": pattern, "maxLength": 8}
        ),
        st.lists(values, min_size=1, max_size=4).map(lambda items: {"enum": items}),
        values.map(lambda value: {"const": value}),
    )


def objects(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    names = st.text(st.sampled_from("abé_ "), min_size=1, max_size=3)
    fields = st.dictionaries(names, st.tuples(inner, st.booleans()), max_size=3)
    return fields.map(
        lambda items: {
            "type": "object",
            "properties": {name: schema for name, (schema, _) in items.items()},
            "required": [name for name, (_, needed) in items.items() if needed],
            "additionalProperties": False,
        }
    )


def schemas() -> st.SearchStrategy[Schema]:
    def grow(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
        return st.one_of(
            st.tuples(inner, st.integers(0, 2)).map(
                lambda t: {"type": "array", "items": t[0], "minItems": t[1], "maxItems": t[1] + 1}
            ),
            objects(inner),
            st.lists(inner, min_size=1, max_size=3).map(lambda items: {"anyOf": items}),
            inner.map(
                lambda s: {"$defs": {"d": s}, "$ref": "#/$defs/d"} if "$defs" not in s else s
            ),
        )

    return st.recursive(leaves(), grow, max_leaves=6).filter(lambda s: not _has_inner_refs(s))


def _has_inner_refs(schema: Schema, depth: int = 0) -> bool:
    """A reference names its place from the root: only there does "#/$defs/d" mean what it says."""
    if depth and "$defs" in schema:
        return True
    children = [*schema.get("anyOf", []), *schema.get("properties", {}).values()]
    children += [schema["items"]] if "items" in schema else []
    children += schema.get("$defs", {}).values()
    return any(_has_inner_refs(child, depth + 1) for child in children)


@pytest.fixture(scope="module")
def llm(default_model: str) -> Iterator[LLM]:
    options = {"cpu_threads": 1, "kv_cache_memory_bytes": "256MiB", "max_model_len": 256}
    with LLM(default_model, max_num_seqs=32, log_level="warning", **options) as llm:
        yield llm


def check(llm: LLM, schemas: Sequence[Schema], seed: int) -> int:
    """Run all at once; how many were finished, each of which validates."""
    params = [
        SamplingParams(
            temperature=1.0,
            seed=seed + index,
            max_tokens=MAX_TOKENS,
            structured_outputs=StructuredOutputsParams(json=schema),
        )
        for index, schema in enumerate(schemas)
    ]
    outputs = llm.generate([PROMPT] * len(schemas), params, use_tqdm=False)
    finished = 0
    for schema, output in zip(schemas, outputs, strict=True):
        assert output.error is None, (schema, output.error)
        if output.outputs[0].finish_reason == "stop":
            finished += 1
            document = json.loads(output.outputs[0].text)
            jsonschema.validate(
                document,
                schema,
                cls=jsonschema.Draft202012Validator,
                format_checker=jsonschema.FormatChecker(),
            )
        else:
            assert len(output.outputs[0].token_ids) == MAX_TOKENS
    return finished


def test_hard_schemas(llm: LLM) -> None:
    finished = check(llm, HARD, seed=1)
    assert finished >= len(HARD) * 3 // 4


def test_a_text_that_the_vocabulary_cannot_spell_is_the_clients_error(llm: LLM) -> None:
    spec = StructuredOutputsParams(json={"const": "a\U000923e3"})
    params = SamplingParams(max_tokens=MAX_TOKENS, structured_outputs=spec)
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    assert "this model cannot write" in str(output.error)
    assert output.error_field == "structured_outputs"


def test_random_schemas(llm: LLM) -> None:
    check_random(llm, batches=3, size=16)


@pytest.mark.slow
def test_five_hundred_random_schemas(llm: LLM) -> None:
    check_random(llm, batches=16, size=32)
    assert all(check(llm, HARD, seed=100 * seed) for seed in range(2, 8))


def check_random(llm: LLM, batches: int, size: int) -> None:
    tally = [0, 0]

    @settings(
        max_examples=batches,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(schemas(), min_size=size, max_size=size), st.integers(0, 2**32))
    def run(batch: list[Schema], seed: int) -> None:
        tally[0] += check(llm, batch, seed)
        tally[1] += len(batch)

    run()
    assert tally[1] >= batches * size
    assert tally[0] > tally[1] * 2 // 3, "most are finished, or this proves little"
