"""Decides which objects of a JSON schema get `additionalProperties: false`.

JSON schema leaves objects open by default, and a model then invents keys. `close_objects` closes
an object where that is sound. Several schemas may describe one object together (`allOf`, or a
`$ref` beside `properties`). Such an object may have the properties of all of them, as with
`unevaluatedProperties: false`. An object stays open if only an open object satisfies its schema,
or if a condition (`not`, `if`) tests it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

# Keywords whose subschemas describe the same value as their parent schema.
BRANCHES = ("allOf", "anyOf", "oneOf")
CONSEQUENCES = ("then", "else")
# Keywords that only test values: closing their subschemas would change the result of the test.
CONDITIONS = ("not", "if", "contains", "propertyNames")
# Keywords by which a schema itself says which other properties are allowed.
OPENNESS = ("additionalProperties", "unevaluatedProperties")
VALUES = ("const", "enum")


def close_objects(root: Any) -> None:
    """Close the objects of a schema, in place."""
    if not isinstance(root, dict):
        return
    closer = _Closer(root)
    closer.visit()
    closer.close()


class _Closer:
    """Finds the schemas that describe a value alone. Only these can be closed."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._found: list[tuple[Schema, list[Schema]]] = []  # each with all schemas of its value
        self._is_part: set[int] = set()  # ids of schemas that share their value with others

    def visit(self) -> None:
        seen: set[tuple[int, bool]] = set()
        waiting: list[tuple[Any, bool]] = [(self._root, True)]
        while waiting:
            schema, is_alone = waiting.pop()
            if not isinstance(schema, dict) or (id(schema), is_alone) in seen:
                continue
            seen.add((id(schema), is_alone))
            if is_alone:
                waiting += self._visit_alone(schema)
                continue
            self._is_part.add(id(schema))
            waiting += ((child, False) for child in self._same_value(schema))
            waiting += ((child, False) for child, _ in _values_in([schema]))
            waiting += ((schema.get(name), False) for name in CONDITIONS)

    def _visit_alone(self, schema: Schema) -> Iterator[tuple[Any, bool]]:
        """Yield the subschemas, each with whether it describes a value alone."""
        if _is_transparent(schema):
            yield from ((child, True) for child in self._same_value(schema))
            yield from _values_in([schema])
            return
        parts = self._parts(schema)
        self._found.append((schema, parts))
        self._is_part.update(id(part) for part in parts[1:])
        yield from _values_in(parts)
        for part in parts:
            yield from ((part.get(name), False) for name in CONDITIONS)

    def close(self) -> None:
        for schema, parts in self._found:
            is_known = all(isinstance(self._resolve(part["$ref"]), dict)
                           for part in parts if "$ref" in part)  # fmt: skip
            is_alone = id(schema) not in self._is_part
            if is_known and is_alone and _can_be_closed(schema, parts):
                names = dict.fromkeys(name for part in parts for name in part.get("properties", ()))
                schema["properties"] = {name: {} for name in names} | schema.get("properties", {})
                schema["additionalProperties"] = False

    def _parts(self, schema: Schema) -> list[Schema]:
        """Return the schema and all others that describe the same value."""
        parts: dict[int, Schema] = {}
        waiting: list[Any] = [schema]
        while waiting:
            part = waiting.pop()
            if isinstance(part, dict) and id(part) not in parts:
                parts[id(part)] = part
                waiting += reversed(list(self._same_value(part)))
        return list(parts.values())

    def _same_value(self, schema: Schema) -> Iterator[Any]:
        yield self._resolve(schema.get("$ref"))
        for name in BRANCHES:
            yield from _list(schema.get(name))
        yield from (schema.get(name) for name in CONSEQUENCES)
        yield from _dict(schema.get("dependentSchemas")).values()

    def _resolve(self, ref: Any) -> Any:
        """Resolve a JSON pointer within the document. Returns None for any other reference."""
        if not isinstance(ref, str) or (ref != "#" and not ref.startswith("#/")):
            return None
        found: Any = self._root
        for step in ref.split("/")[1:]:
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and re.fullmatch("[0-9]{1,9}", key):
                found = found[int(key)] if int(key) < len(found) else None
            else:
                found = _dict(found).get(key)
        return found


def _is_transparent(schema: Schema) -> bool:
    """Whether the schema only refers to other schemas (one branch keyword or a `$ref`)."""
    given = [name for name in (*BRANCHES, "$ref", "dependentSchemas", *CONSEQUENCES)
             if name in schema]  # fmt: skip
    if len(given) != 1 or given[0] not in (*BRANCHES, "$ref"):
        return False
    if given[0] == "allOf" and len(_list(schema["allOf"])) > 1:
        return False
    return not any(
        name in schema
        for name in ("properties", "patternProperties", "required", "minProperties", *OPENNESS)
    )


def _values_in(parts: list[Schema]) -> Iterator[tuple[Any, bool]]:
    """Yield the schemas of values inside the value of `parts`, each with whether it is alone."""
    named = Counter(name for part in parts for name in _dict(part.get("properties")))
    is_free = not any("patternProperties" in part or "not" in part for part in parts)
    is_only = len(parts) == 1
    is_only_list = sum("items" in part or "prefixItems" in part for part in parts) == 1
    for part in parts:
        for name, value in _dict(part.get("properties")).items():
            yield value, named[name] == 1 and is_free
        patterns = _dict(part.get("patternProperties"))
        for value in patterns.values():
            yield value, is_only and not named and len(patterns) == 1
        for name in (*OPENNESS, "unevaluatedItems"):
            yield part.get(name), is_only
        yield part.get("items"), is_only_list
        for value in (*_list(part.get("items")), *_list(part.get("prefixItems"))):
            yield value, is_only_list


def _can_be_closed(schema: Schema, parts: list[Schema]) -> bool:
    if not any(isinstance(part.get("properties"), dict) for part in parts):
        return False  # it names no properties: any object is valid
    for part in parts:
        if any(name in part for name in (*OPENNESS, *VALUES, "$dynamicRef", "not")):
            return False
        if "patternProperties" in part and part is not schema:
            return False
        if not isinstance(part.get("properties", {}), dict):
            return False
    names = {name for part in parts for name in part.get("properties", ())}
    needed: set[str] = set()
    for part in parts:
        for listed in (part.get("required"), *_dict(part.get("dependentRequired")).values()):
            needed.update(name for name in _list(listed) if isinstance(name, str))
    fewest = max((_int(part.get("minProperties")) for part in parts), default=0)
    return needed <= names and fewest <= len(names)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _int(value: Any) -> int:
    return value if isinstance(value, int) else 0
