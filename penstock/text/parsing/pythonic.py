"""Parses calls written in Python: `[get_weather(city="Paris"), get_time()]`. Llama 3.2 and 4."""

from __future__ import annotations

import json
import re

from penstock.text.parsing.emitter import Emitter
from penstock.text.parsing.json_text import MAX_DEPTH, load_json, to_json
from penstock.text.parsing.stream import Malformed, Steps, TextStream, Truncated
from penstock.text.parsing.tool_format import UnmarkedFormat, check_name
from penstock.text.parsing.typed_values import python_literal

_NAME_END = re.compile(r"[^\w.\-]")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class Pythonic(UnmarkedFormat):
    """A list of calls with keyword arguments that are literals.

    It is at the beginning of the output or between `<|python_start|>` and `<|python_end|>`.
    """

    openings = ("[",)
    name_begun = re.compile(r"[\[,]\s*([\w.\-]*)\Z")
    begins = ("<|python_start|>", "<|python_tag|>")
    markers = ("<|python_start|>", "<|python_end|>", "<|python_tag|>")

    def read_calls(self, stream: TextStream, out: Emitter, marker: str) -> Steps[None]:
        yield from stream.skip_space()
        yield from stream.expect("[")
        while True:
            yield from stream.skip_space()
            name = yield from _read_name(stream)
            if not marker and name not in self._tools:
                raise Malformed(f"there is no tool {name!r:.40}")
            yield from stream.expect("(")
            out.start_call(check_name(name))
            yield from _read_keywords(stream, out)
            out.end_call()
            yield from stream.skip_space()
            if (yield from stream.expect(",", "]")) == "]":
                break
        yield from stream.skip_space()
        yield from stream.pass_over("<|python_end|>")


def _read_name(stream: TextStream) -> Steps[str]:
    count = 0
    while True:
        text = yield from stream.peek(count + 1)
        if len(text) <= count:
            raise Truncated
        if _NAME_END.match(text[count]):
            return stream.take(count)
        count += 1
        if count > 256:
            raise Malformed("no name has that many characters")


def _read_keywords(stream: TextStream, out: Emitter) -> Steps[None]:
    """Arguments up to the closing parenthesis, passed on as JSON one by one."""
    out.arguments("{")
    comma = ""
    while True:
        yield from stream.skip_space()
        if (yield from stream.accept(")")):
            break
        key = yield from _read_name(stream)
        yield from stream.skip_space()
        yield from stream.expect("=")
        if not key.isidentifier():
            raise Malformed(f"{key!r:.40} is not a parameter name")
        text = yield from _read_literal(stream)
        value = python_literal(text)
        if value is None and text != "None":
            value = _json_literal(text)
        out.arguments(f"{comma}{json.dumps(key)}: {to_json(value)}")
        comma = ", "
        if (yield from stream.expect(",", ")")) == ")":
            break
    out.arguments("}")


def _json_literal(text: str) -> object:
    """JSON's literals, which models mix with Python's."""
    words = {"true": True, "false": False, "null": None}
    if text in words:
        return words[text]
    try:
        return load_json(text)
    except ValueError:
        raise Malformed(f"{text!r:.40} is not a literal") from None


def _read_literal(stream: TextStream) -> Steps[str]:
    """The text of a value, up to the comma or parenthesis after it."""
    pieces: list[str] = []
    open_brackets: list[str] = []
    while True:
        char = yield from stream.next_char()
        if not open_brackets and char in ",)":
            return "".join(pieces).strip()
        if char in "\"'":
            pieces.append((yield from _read_quoted(stream)))
            continue
        if char in _CLOSING:
            open_brackets.append(_CLOSING[char])
            if len(open_brackets) > MAX_DEPTH:
                raise Malformed(f"a value is nested more than {MAX_DEPTH} deep")
        elif open_brackets and char == open_brackets[-1]:
            open_brackets.pop()
        elif char in ")]}":
            raise Malformed(f"{char!r} closes nothing")
        pieces.append(stream.take(1))


def _read_quoted(stream: TextStream) -> Steps[str]:
    """A string with its quotes. Line breaks in it become escapes."""
    quote = yield from stream.expect('"""', "'''", '""', "''", '"', "'")
    if len(quote) == 2:
        return quote
    pieces = [quote]
    while True:
        closing = yield from stream.until((quote, "\\", "\n", "\r"), pieces.append)
        if closing is None:
            raise Truncated
        if closing in "\r\n":
            closing = repr(closing)[1:-1]
        pieces.append(closing)
        if closing == quote:
            return "".join(pieces)
        if closing == "\\":
            yield from stream.next_char()
            pieces.append(stream.take(1))
