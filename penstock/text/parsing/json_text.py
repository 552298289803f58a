"""Reads JSON as it arrives: checks it, and passes it on piece by piece."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Any

from penstock.text.parsing.stream import Malformed, Sink, Steps, TextStream, Truncated

MAX_DEPTH = 64
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR_END = re.compile(r"[\s,\]}]")
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null", re.ASCII)
_MAX_SCALAR = 400  # characters; longer numbers are not useful
_ESCAPES = 'nrtbf/\\"'


def to_json(value: Any) -> str:
    """Readable JSON that can be encoded, whatever its strings contain."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate that a model escaped
        return json.dumps(value)
    return text


def load_json(text: str) -> Any:
    """Parse complete JSON. Raises ValueError for what `read_value` refuses.

    This includes NaN and numbers beyond a float's range, which Python reads but JSON lacks, and
    nesting too deep for other writers.
    """
    try:
        value = json.loads(text, strict=False)
        json.dumps(value, allow_nan=False)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None
    level, depth = [value], 0
    while level := [part for outer in level for part in _parts(outer)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"JSON is nested more than {MAX_DEPTH} deep")
    return value


def _parts(value: Any) -> Collection[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def read_value(stream: TextStream, sink: Sink, depth: int = 0) -> Steps[None]:
    """Read one JSON value and pass its text on. Raises Malformed for anything else.

    Control characters in strings, which JSON forbids but models write, are passed on escaped.
    """
    sink((yield from stream.skip_space()))
    char = yield from stream.next_char()
    if char == '"':
        yield from _read_string(stream, sink)
    elif char in "{[":
        if depth == MAX_DEPTH:
            raise Malformed(f"JSON is nested more than {MAX_DEPTH} deep")
        yield from _read_items(stream, sink, depth + 1)
    else:
        yield from _read_scalar(stream, sink)


def _read_items(stream: TextStream, sink: Sink, depth: int) -> Steps[None]:
    """An object or an array."""
    is_object = stream.take(1) == "{"
    end = "}" if is_object else "]"
    sink("{" if is_object else "[")
    sink((yield from stream.skip_space()))
    if (yield from stream.accept(end)):
        sink(end)
        return
    while True:
        if is_object:
            sink((yield from stream.skip_space()))
            yield from _read_string(stream, sink)
            sink((yield from stream.skip_space()))
            sink((yield from stream.expect(":")))
        yield from read_value(stream, sink, depth)
        sink((yield from stream.skip_space()))
        after = yield from stream.expect(",", end)
        sink(after)
        if after == end:
            return


def _read_string(stream: TextStream, sink: Sink) -> Steps[None]:
    sink((yield from stream.expect('"')))
    while True:
        char = yield from stream.next_char()
        if char == '"':
            sink(stream.take(1))
            return
        if char == "\\":
            yield from _read_escape(stream, sink)
        elif char < " ":
            sink(json.dumps(stream.take(1))[1:-1])
        else:
            sink(stream.take_match(_PLAIN))  # the part that has arrived


def _read_escape(stream: TextStream, sink: Sink) -> Steps[None]:
    escape = yield from stream.peek(2)
    if len(escape) < 2:
        raise Truncated
    if escape[1] in _ESCAPES:
        sink(stream.take(2))
        return
    if escape[1] != "u":
        raise Malformed(f"{escape!r} is not a JSON escape")
    escape = yield from stream.peek(6)
    if len(escape) < 6:
        raise Truncated
    if not re.fullmatch(r"\\u[0-9a-fA-F]{4}", escape):
        raise Malformed(f"{escape!r} is not a JSON escape")
    sink(stream.take(6))


def _read_scalar(stream: TextStream, sink: Sink) -> Steps[None]:
    """A number, true, false or null."""
    text = ""
    while True:
        available = yield from stream.peek(len(text) + 1)
        at_end = len(available) == len(text)
        if at_end or _SCALAR_END.match(available[-1]):
            break
        text = available
        if len(text) > _MAX_SCALAR or not _begins_scalar(text):
            raise Malformed(f"{text!r:.40} is not a JSON value")
    if not _SCALAR.fullmatch(text):
        if at_end:
            raise Truncated
        raise Malformed(f"{text!r:.40} is not a JSON value")
    sink(stream.take(len(text)))


def _begins_scalar(text: str) -> bool:
    if text[0] in "-0123456789":
        return text[-1] in "-+.eE0123456789"
    return any(word.startswith(text) for word in ("true", "false", "null"))


def read_whole_value(stream: TextStream) -> Steps[Any]:
    """One JSON value, parsed."""
    pieces: list[str] = []
    yield from read_value(stream, pieces.append)
    return json.loads("".join(pieces))


def read_object_keys(stream: TextStream, on_key: Callable[[str], Steps[None]]) -> Steps[None]:
    """Read an object. `on_key` is called at each key's value, and must read it."""
    yield from stream.expect("{")
    yield from stream.skip_space()
    if (yield from stream.accept("}")):
        return
    while True:
        yield from stream.skip_space()
        pieces: list[str] = []
        yield from _read_string(stream, pieces.append)
        yield from stream.skip_space()
        yield from stream.expect(":")
        yield from stream.skip_space()
        yield from on_key(json.loads("".join(pieces)))
        yield from stream.skip_space()
        if (yield from stream.expect(",", "}")) == "}":
            return
