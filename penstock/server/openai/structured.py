"""Reads from a request's body which format its output must match."""

from __future__ import annotations

from typing import Any

from penstock.protocol.errors import InputError
from penstock.protocol.structured import StructuredOutputsParams
from penstock.server.openai.formats import JsonSchemaFormat, ResponseFormat
from penstock.server.openai.protocol import CompletionBody

FIELD = "response_format"


def structured_outputs(body: CompletionBody) -> StructuredOutputsParams | None:
    """Read `response_format` or `structured_outputs`. Returns None if neither constrains."""
    asked = _from_response_format(body.response_format)
    if body.structured_outputs is None:
        return asked
    if asked is not None:
        raise InputError(
            "structured_outputs and response_format cannot be combined: leave one out",
            "structured_outputs",
        )
    given = body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
    return StructuredOutputsParams(**given)


def _from_response_format(given: ResponseFormat | None) -> StructuredOutputsParams | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return StructuredOutputsParams(json_object=True, field=FIELD)
    if given.type == "structural_tag":
        tag: dict[str, Any] = {"type": given.type, **(given.model_extra or {})}
        return StructuredOutputsParams(structural_tag=tag, lenient=True, field=FIELD)
    if given.json_schema is None:
        raise InputError(f"{FIELD} of type json_schema needs json_schema", FIELD)
    return schema_params(given.json_schema, f"{FIELD}.json_schema.schema")


def schema_params(given: JsonSchemaFormat, field: str) -> StructuredOutputsParams:
    """Params for JSON that matches a schema, or any JSON without one.

    `field` is the client's name for it.
    """
    schema = {} if given.schema_ is None else given.schema_
    return StructuredOutputsParams(json=schema, lenient=not given.strict, field=field)
