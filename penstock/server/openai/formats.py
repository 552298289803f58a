"""Fields of request bodies that say which form the output must have."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from penstock.server.schema.base import Body, Items, Text


class JsonSchemaFormat(Body):
    name: Text | None = None
    description: Text | None = None
    schema_: dict[str, Any] | bool | None = Field(
        None, alias="schema", description="JSON schema. Any JSON if left out."
    )
    strict: bool | None = Field(
        None,
        description="Reject keywords that cannot be enforced. Off: ignore them.",
    )


class ResponseFormat(Body):
    model_config = ConfigDict(extra="allow")
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = Field(None, description="Required for type json_schema.")


class StructuredOutputs(Body):
    """What the output must match: exactly one of the first six."""

    model_config = ConfigDict(extra="forbid")
    json_: dict[str, Any] | Text | bool | None = Field(
        None, alias="json", description="A JSON schema."
    )
    regex: Text | None = Field(
        None, description="Regular expression that the whole output matches."
    )
    choice: Items[Text] | None = Field(None, description="The output is one of these strings.")
    grammar: Text | None = Field(None, description="Grammar in Lark or EBNF syntax.")
    json_object: bool | None = Field(None, description="Any JSON object.")
    structural_tag: dict[str, Any] | Text | None = Field(
        None, description="Structural tags within free text."
    )
    disable_any_whitespace: bool | None = Field(
        None, description="Generate JSON without whitespace."
    )
    disable_additional_properties: bool | None = Field(
        None,
        description="On by default: JSON objects have only the properties in their schema.",
    )
    whitespace_pattern: Text | None = Field(
        None, description="Regular expression for whitespace between JSON tokens."
    )
