"""What is refused before anything is compiled."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock import SamplingParams, StructuredOutputsParams
from penstock.protocol.errors import InputError


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object, structural_tag, got none"),
        ({"json": {}, "regex": "a"}, "got json, regex"),
        ({"json_object": False}, "got none"),
        ({"regex": ""}, "regex must be a text"),
        ({"regex": 5}, "regex must be a text, got 5"),
        ({"choice": []}, "not empty"),
        ({"choice": ["a", ""]}, "not empty"),
        ({"choice": "ab"}, "must be a list of texts"),
        ({"choice": ["a"] * 10_001}, "at most 10000 texts"),
        ({"regex": "a" * 600_000}, "at most 524288 characters"),
        ({"json": {"x": float("nan")}}, "must be JSON"),
        ({"json": {"x": 1j}}, "must be JSON"),
        ({"regex": "\ud800"}, "lone surrogate"),
        ({"regex": "a", "reasoning_end": "x" * 2000}, "reasoning_end may be at most"),
        ({"json": {}, "disable_any_whitespace": 1}, "must be True or False"),
        ({"json": {}, "whitespace_pattern": 3}, "whitespace_pattern must be a text"),
    ],
    ids=lambda value: f"{value!r:.40}",
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text) as caught:
        StructuredOutputsParams(**given)
    assert caught.value.field == "structured_outputs"


def test_a_schema_nested_beyond_what_python_writes_is_refused() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(InputError, match="nested too deeply"):
        StructuredOutputsParams(json=deep)


def test_sampling_params_take_nothing_else_for_it() -> None:
    with pytest.raises(InputError, match="must be StructuredOutputsParams") as caught:
        SamplingParams(structured_outputs={"json": {}})  # type: ignore[arg-type]
    assert caught.value.field == "structured_outputs"


def test_it_crosses_processes_whole() -> None:
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(json={"const": "é"}, reasoning_end="</x>")
    )
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert copy == params
    assert copy.structured_outputs is not None
    assert copy.structured_outputs.kind == "json"
    assert copy.structured_outputs.json == '{"const": "é"}'
