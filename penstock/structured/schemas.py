"""Reads JSON schemas from requests."""

from __future__ import annotations

import json
from typing import Any

from penstock.protocol.errors import InputError
from penstock.protocol.structured import FIELD


def read_schema(text: str, field: str) -> Any:
    """Parse a JSON schema: an object, true or false. Raises `InputError` for anything else."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{field} must be JSON: {error}", FIELD) from None
    if not isinstance(schema, (dict, bool)):
        raise InputError(f"{field} must be a JSON schema, an object, got {text!r:.80}", FIELD)
    return schema
