"""What a response is asked with, and the events that tell of it, in the official order."""

from __future__ import annotations

from typing import Any

from tool_schemas import TIME, WEATHER

TOOLS: Any = [
    {"type": "function", "name": "get_weather", "description": "Weather.", "parameters": WEATHER},
    {"type": "function", "name": "get_time", "parameters": TIME},
]
MESSAGE_EVENTS = [
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
REASONING_EVENTS = [
    "response.output_item.added",
    "response.content_part.added",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
CALL_EVENTS = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]


def types_of(events: Any) -> list[str]:
    """Types in their order, repeated deltas once."""
    types: list[str] = []
    for event in events:
        if not types or types[-1] != event.type:
            types.append(event.type)
    return types
