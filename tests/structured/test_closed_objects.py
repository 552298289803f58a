"""Objects have only the properties that their schema names: where that is sound, and only there."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.structured.closed_objects import close_objects

Schema = dict[str, Any]
INT = {"type": "integer"}


def thing(*names: str, **more: Any) -> Schema:
    return {"type": "object", "properties": dict.fromkeys(names, INT), **more}


def closed(schema: Schema) -> Schema:
    changed = copy.deepcopy(schema)
    close_objects(changed)
    return changed


def accepts(schema: Schema, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


# A schema, values that it takes when it is closed, and values that only the open one takes.
CASES: dict[str, tuple[Schema, list[Any], list[Any]]] = {
    "an object": (thing("a"), [{"a": 1}, {}], [{"a": 1, "b": 1}]),
    "an object within others": (
        {"type": "array", "items": {"properties": {"in": thing("a")}}},
        [[{"in": {"a": 1}}]],
        [[{"in": {"b": 1}}], [{"x": 1}]],
    ),
    "an object that may be null": (thing("a", type=["object", "null"]), [None, {}], [{"b": 1}]),
    "a definition": (
        {"$ref": "#/$defs/it", "$defs": {"it": thing("a")}}, [{"a": 1}], [{"b": 1}],
    ),
    "a tree": (
        {
            "$defs": {"node": {"properties": {"kids": {"items": {"$ref": "#/$defs/node"}}}}},
            "$ref": "#/$defs/node",
        },
        [{"kids": [{"kids": []}]}],
        [{"kids": [{"x": 1}]}],
    ),
    "one of several": (
        {"anyOf": [thing("a"), thing("b"), {"type": "null"}]},
        [{"a": 1}, {"b": 1}, None],
        [{"a": 1, "b": 1}, {"c": 1}],
    ),
    "all of several": (
        {"allOf": [thing("a", required=["a"]), thing("b", required=["b"])]},
        [{"a": 1, "b": 1}],
        [{"a": 1, "b": 1, "c": 1}],
    ),
    "what it inherits": (
        {
            "$defs": {"base": thing("a", required=["a"])},
            "allOf": [{"$ref": "#/$defs/base"}],
            "properties": {"b": thing("c")},
        },
        [{"a": 1, "b": {"c": 1}}],
        [{"a": 1, "c": 1}, {"a": 1, "b": {"d": 1}}],
    ),
    "what depends on another": (
        thing("a", anyOf=[{"required": ["a"]}, thing("b", required=["b"])]),
        [{"a": 1}, {"a": 1, "b": 1}],
        [{"a": 1, "c": 1}],
    ),
    "patterns": (
        thing("a", patternProperties={"^x": INT}), [{"a": 1, "x1": 1}], [{"a": 1, "b": 1}],
    ),
    "what it says of others": (thing("a", additionalProperties=True), [{"b": 1}], []),
    "a schema of others": (
        thing("a", additionalProperties=thing("b")), [{"x": {"b": 1}}], [{"x": {"c": 1}}],
    ),
    "what nobody evaluates": (thing("a", unevaluatedProperties=INT), [{"b": 1}], []),
    "no names at all": ({"type": "object"}, [{"b": 1}], []),
    "an empty list of names": ({"type": "object", "properties": {}}, [{}], [{"b": 1}]),
    "a name that must be there and is nowhere": (thing("a", required=["b"]), [{"b": 1}], []),
    "more properties than names": (thing("a", minProperties=2), [{"a": 1, "b": 1}], []),
    "values": ({**thing("a"), "enum": [{"b": 1}]}, [{"b": 1}], []),
    "what must not be": ({"not": thing("a", required=["a"])}, [{"b": 1}], []),
    "one property in two schemas": (
        {
            "allOf": [
                {"properties": {"x": thing("a", required=["a"])}, "required": ["x"]},
                {"properties": {"x": thing("b", required=["b"])}},
            ]
        },
        [{"x": {"a": 1, "b": 1}}],
        [{"x": {"a": 1, "b": 1}, "y": 1}],
    ),
    "a reference to elsewhere": (
        {"properties": {"a": INT}, "anyOf": [True, {"$ref": "other.json"}]}, [{"b": 1}], [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_object_has_what_its_schema_names(name: str) -> None:
    schema, kept, refused = CASES[name]
    changed = closed(schema)
    for value in kept:
        assert accepts(schema, value)
        assert accepts(changed, value)
    for value in refused:
        assert accepts(schema, value)
        assert not accepts(changed, value)


KEYS = ("a", "b", "c")
FLAT: list[Any] = [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 1, "c": 1}]
DEEP = [
    dict(zip(keys, values, strict=True))
    for size in range(3)
    for keys in itertools.combinations(KEYS, size)
    for values in itertools.product([1, *FLAT], repeat=size)
]
leaves = st.just(INT) | st.builds(
    lambda names, required: thing(*names, required=sorted(required)),
    st.sets(st.sampled_from(KEYS)),
    st.sets(st.sampled_from(KEYS), max_size=1),
)
refs = st.sampled_from([{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/two"}])


def composed(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    several = st.lists(inner, min_size=1, max_size=2)
    return st.fixed_dictionaries(
        {},
        optional={
            "properties": st.dictionaries(st.sampled_from(KEYS), inner, max_size=2),
            "required": st.lists(st.sampled_from(KEYS), max_size=1),
            "allOf": several,
            "anyOf": several,
            "patternProperties": st.dictionaries(st.just("^c"), inner, max_size=1),
            "additionalProperties": st.booleans(),
            "minProperties": st.integers(0, 2),
            "not": inner,
        },
    )


schemas = st.recursive(leaves | refs, composed, max_leaves=6)


def taken(schema: Schema) -> list[Any]:
    validator = jsonschema.Draft202012Validator(schema)
    return [value for value in DEEP if validator.is_valid(value)]


@given(root=schemas, one=leaves, two=schemas)
@settings(max_examples=100, deadline=None)
def test_what_is_closed_takes_less_and_not_nothing(root: Schema, one: Schema, two: Schema) -> None:
    """Of objects, two levels deep, over three names."""
    schema = {"$defs": {"one": one, "two": two}, "allOf": [root]}
    try:
        before = taken(schema)
    except BaseException as error:  # it is a definition of itself
        # Where the stack ends inside of rpds, that panics instead.
        if not isinstance(error, RecursionError) and type(error).__name__ != "PanicException":
            raise
        return
    after = taken(closed(schema))
    assert all(value in before for value in after)
    assert bool(after) == bool(before)


words = st.sampled_from(
    [*KEYS, "properties", "required", "allOf", "anyOf", "oneOf", "items", "not", "if", "then",
     "$ref", "$defs", "additionalProperties", "patternProperties", "minProperties", "prefixItems",
     "dependentSchemas", "dependentRequired", "type", "#", "#/$defs/a", "#/allOf/0", "#/items/9"]
)  # fmt: skip
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | words | st.just("#/allOf/" + "9" * 5000),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4),
    max_leaves=12,
)


@given(anything)
@settings(deadline=None)
def test_nothing_that_a_client_sends_as_a_schema_is_too_much(schema: Any) -> None:
    close_objects(schema)
