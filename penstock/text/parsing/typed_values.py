"""Converts arguments written as plain text, such as in XML, to JSON by the tool's schema."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from penstock.text.parsing.emitter import Emitter
from penstock.text.parsing.json_text import load_json, to_json
from penstock.text.parsing.stream import Malformed

_MAX_LITERAL = 100_000  # characters of a Python literal, which is parsed at once
_TYPES_OF = {
    str: "string", bool: "boolean", int: "integer", float: "number",
    list: "array", dict: "object", type(None): "null",
}  # fmt: skip


def allowed_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that `schema` allows; empty if it does not say.

    It visits each part of the schema once, however often others refer to it.
    """
    types: set[str] = set()
    seen: set[int] = set()
    parts = [schema]
    while parts:
        part = parts.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        own = _own_types(part)
        if own:
            types |= own
            continue
        for key in ("anyOf", "oneOf", "allOf"):
            branches = part.get(key)
            if isinstance(branches, (list, tuple)):
                parts += branches
        if isinstance(part.get("$ref"), str):
            parts.append(_resolve(part["$ref"], root))
    return frozenset(types)


def _own_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types that `schema` itself names."""
    types: set[str] = set()
    declared = schema.get("type")
    if isinstance(declared, str):
        types.add(declared)
    elif isinstance(declared, (list, tuple)):
        types.update(name for name in declared if isinstance(name, str))
    if schema.get("nullable") is True and types:
        types.add("null")
    if types:
        return frozenset(types)
    if "const" in schema:
        return frozenset({_TYPES_OF.get(type(schema["const"]), "string")})
    if isinstance(schema.get("enum"), (list, tuple)):
        return frozenset(_TYPES_OF.get(type(value), "string") for value in schema["enum"])
    return frozenset()


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """The target of a `$ref` within the schema, or None."""
    if not reference.startswith("#/"):
        return None
    at: Any = root
    for part in reference[2:].split("/"):
        if not isinstance(at, Mapping):
            return None
        at = at.get(part.replace("~1", "/").replace("~0", "~"))
    return at


def json_from_text(text: str, types: frozenset[str]) -> str:
    """The JSON text of a value written as `text`, given the types it may have.

    A value that fits none of them stays a string, for the tool to refuse.
    """
    stripped = text.strip()
    if types == {"string"}:
        return to_json(text)
    if stripped.lower() in ("null", "none"):
        return "null"
    if "boolean" in types and stripped.lower() in ("true", "false"):
        return stripped.lower()
    value = _parse(stripped)
    if value is None or isinstance(value, str):
        return to_json(text)
    if isinstance(value, float) and value.is_integer() and "integer" in types - {"number"}:
        value = int(value)
    kind = _TYPES_OF[type(value)]
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    if fits or "string" not in types:
        return to_json(value)
    return to_json(text)


def _parse(text: str) -> Any:
    """The value of JSON, or of a Python literal, which some models write; None for neither."""
    try:
        return load_json(text)
    except ValueError:
        pass
    return python_literal(text) if text[:1] in "[{(" else None


def python_literal(text: str) -> Any:
    """The JSON value of a Python literal; None also if it has none."""
    if len(text) > _MAX_LITERAL:
        return None
    try:
        value = ast.literal_eval(text)
        return load_json(json.dumps(value, allow_nan=False))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


class ArgumentsWriter:
    """Writes a call's arguments as a JSON object, value by value. Plain strings are streamed."""

    def __init__(self, out: Emitter, parameters: Mapping[str, Any]) -> None:
        self._out = out
        self._parameters = parameters
        properties = parameters.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._num_values = 0
        self._types: frozenset[str] = frozenset()
        self._pieces: list[str] = []
        out.arguments("{")

    def begin_value(self, key: str) -> None:
        key = key.strip()
        if not key.isprintable() or not key:
            raise Malformed(f"{key!r:.40} is not a parameter name")
        self._types = allowed_types(self._properties.get(key), self._parameters)
        self._pieces = []
        self._out.arguments((", " if self._num_values else "") + to_json(key) + ": ")
        self._num_values += 1
        if self._is_plain_string:
            self._out.arguments('"')

    @property
    def _is_plain_string(self) -> bool:
        return self._types == {"string"}

    def add(self, text: str) -> None:
        if self._is_plain_string:
            self._out.arguments(to_json(text)[1:-1])
        else:
            self._pieces.append(text)

    def end_value(self) -> None:
        if self._is_plain_string:
            self._out.arguments('"')
        else:
            self._out.arguments(json_from_text("".join(self._pieces), self._types))

    def end(self) -> None:
        self._out.arguments("}")
