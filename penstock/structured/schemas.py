"""What is done to a JSON schema before a backend sees it."""

from __future__ import annotations

import json
from typing import Any

from penstock.protocol.errors import InputError
from penstock.protocol.structured import FIELD

# Keywords whose value is a schema, a list of schemas, or schemas by name.
ONE = ("additionalProperties", "contains", "items", "not", "propertyNames", "if", "then", "else")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def read_schema(text: str, field: str) -> Any:
    """The schema in a JSON text: an object, or true or false."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{field} must be JSON: {error}", FIELD) from None
    if not isinstance(schema, (dict, bool)):
        raise InputError(f"{field} must be a JSON schema, an object, got {text!r:.80}", FIELD)
    return schema


def forbid_additional_properties(schema: Any) -> Any:
    """The schema with `additionalProperties: false` where an object's schema says nothing of it."""
    if not isinstance(schema, dict):
        return schema
    changed = dict(schema)
    for name in ONE:
        if isinstance(changed.get(name), dict):
            changed[name] = forbid_additional_properties(changed[name])
    for name in LISTS:
        if isinstance(changed.get(name), list):
            changed[name] = [forbid_additional_properties(item) for item in changed[name]]
    for name in NAMED:
        if isinstance(changed.get(name), dict):
            changed[name] = {
                key: forbid_additional_properties(item) for key, item in changed[name].items()
            }
    is_object = "properties" in changed or changed.get("type") == "object"
    if is_object:
        changed.setdefault("additionalProperties", False)
    return changed
