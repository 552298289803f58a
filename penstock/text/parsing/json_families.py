"""Families whose calls are JSON between markers, and the bare array for tool_choice.

These are hermes, llama3_json, granite, mistral, deepseek_v3 and kimi_k2.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.text.parsing.emitter import Emitter
from penstock.text.parsing.formats import CallGrammar, CallShape, Tool
from penstock.text.parsing.json_calls import (
    read_call_object,
    read_call_objects,
    read_named_call,
)
from penstock.text.parsing.stream import Steps, TextStream
from penstock.text.parsing.tool_format import ToolFormat, UnmarkedFormat

# Schema keywords that may define properties.
ARGUMENTS = frozenset(
    (
        "$dynamicRef", "$ref", "additionalProperties", "allOf", "anyOf", "const", "enum", "if",
        "oneOf", "patternProperties", "properties", "required", "unevaluatedProperties",
    )
)  # fmt: skip


class Hermes(ToolFormat):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen, Granite 4."""

    begins = ("<tool_call>",)
    markers = ("<tool_call>", "</tool_call>")

    def read_calls(self, stream: TextStream, out: Emitter, marker: str) -> Steps[None]:
        yield from read_call_objects(stream, out)
        while True:
            yield from stream.skip_space()
            if not (yield from stream.next_is("{")):
                break
            yield from read_call_object(stream, out)
        yield from stream.pass_over("</tool_call>")

    @classmethod
    def grammar(
        cls, tools: Sequence[Tool], parallel: bool, chat_template: str = ""
    ) -> CallGrammar | None:
        calls = object_shapes(tools, "arguments", "<tool_call>\n", "\n</tool_call>")
        # A model that was not trained on calls writes a line break after one, because text
        # continues like that. It would then have to call again.
        separator = "\n" if "<tool_call>" in chat_template else ""
        return CallGrammar("", calls, separator, "", parallel, cls.markers)


class BareJson(UnmarkedFormat):
    """`[{"name": ..., "parameters": {...}}, ...]`, or one such object, with nothing before it."""

    openings = ("{", "[")
    before, between, after = "[", ", ", "]"  # calls that a grammar writes
    name_begun = re.compile(r'"(?:name|function)"\s*:\s*"([^"]*)\Z')

    def read_calls(self, stream: TextStream, out: Emitter, marker: str) -> Steps[None]:
        yield from read_call_objects(stream, out, known_names=self._tools)
        while True:
            yield from stream.skip_space()
            if not (yield from stream.accept(";")):
                return
            yield from stream.skip_space()
            yield from read_call_object(stream, out, known_names=self._tools)

    @classmethod
    def grammar(
        cls, tools: Sequence[Tool], parallel: bool, chat_template: str = ""
    ) -> CallGrammar | None:
        calls = object_shapes(tools, "parameters")
        return CallGrammar(cls.before, calls, cls.between, cls.after, parallel)


class Llama3Json(BareJson):
    """`{"name": ..., "parameters": {...}}`, several separated by `; `.

    `<|python_tag|>` may come first, and then text may precede it.
    """

    begins = ("<|python_tag|>",)
    markers = ("<|python_tag|>",)
    before, between, after = "", "; ", ""


class Granite(ToolFormat):
    """`<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`: Granite 3."""

    begins = ("<|tool_call|>", "<tool_call>")
    markers = ("<|tool_call|>", "<tool_call>", "</tool_call>")

    def read_calls(self, stream: TextStream, out: Emitter, marker: str) -> Steps[None]:
        yield from read_call_objects(stream, out)
        yield from stream.skip_space()
        yield from stream.pass_over("</tool_call>")

    @classmethod
    def grammar(
        cls, tools: Sequence[Tool], parallel: bool, chat_template: str = ""
    ) -> CallGrammar | None:
        calls = object_shapes(tools, "arguments")
        return CallGrammar("<|tool_call|>[", calls, ", ", "]", parallel, ("<|tool_call|>",))


class Mistral(ToolFormat):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, in tokenizers before v11.

    From v11 on, each call is `[TOOL_CALLS]name[ARGS]{...}`, in some versions with `[CALL_ID]id`
    after the name.
    """

    begins = ("[TOOL_CALLS]",)
    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def read_calls(self, stream: TextStream, out: Emitter, marker: str) -> Steps[None]:
        yield from stream.skip_space()
        if (yield from stream.next_is("[", "{")):
            yield from read_call_objects(stream, out)
            return
        name, after = yield from stream.read_until(("[ARGS]", "[CALL_ID]", "{"))
        call_id = None
        if after == "[CALL_ID]":
            call_id, _ = yield from stream.read_until(("[ARGS]",))
        elif after == "{":
            stream.put_back(after)
        yield from read_named_call(stream, out, name, ("[TOOL_CALLS]",), call_id)

    @staticmethod
    def new_call_id() -> str:
        """Mistral's templates accept only nine letters and digits."""
        alphabet = string.ascii_letters + string.digits
        return "".join(secrets.choice(alphabet) for _ in range(9))

    @classmethod
    def grammar(
        cls, tools: Sequence[Tool], parallel: bool, chat_template: str = ""
    ) -> CallGrammar | None:
        if "[TOOL_CALLS]" in chat_template and "[ARGS]" not in chat_template:
            calls = object_shapes(tools, "arguments")
            return CallGrammar("[TOOL_CALLS][", calls, ", ", "]", parallel, cls.markers)
        calls = named_shapes(tools, "[TOOL_CALLS]{name}[ARGS]", "")
        return CallGrammar("", calls, "", "", parallel, cls.markers)


class SectionedFormat(ToolFormat):
    """A section of calls, each with an end marker.

    `markers` are, in order: section start, call start, arguments start, call end, section end.
    """

    def read_calls(self, stream: TextStream, out: Emitter, marker: str) -> Steps[None]:
        section, call, _, call_end, section_end = self.markers
        if marker == section:
            yield from stream.skip_space()
            yield from stream.expect(call)
        while True:
            yield from self._read_call(stream, out)
            yield from stream.expect(call_end)
            yield from stream.skip_space()
            if (yield from stream.accept(call, section_end)) != call:
                return

    @abstractmethod
    def _read_call(self, stream: TextStream, out: Emitter) -> Steps[None]:
        """Read a call after its marker and the white space behind it."""


class DeepSeekV3(SectionedFormat):
    """`<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, then arguments fenced as json.

    V3.1 writes `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}`.
    """

    begins = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    markers = (*begins, "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")

    def _read_call(self, stream: TextStream, out: Emitter) -> Steps[None]:
        _, _, separator, call_end, _ = self.markers
        name, _ = yield from stream.read_until((separator,))
        yield from stream.skip_space()
        fenced = not (yield from stream.next_is("{", call_end))
        if fenced:
            name, _ = yield from stream.read_until(("\n",))
            yield from stream.skip_space()
            yield from stream.pass_over("```json", "```")
        yield from read_named_call(stream, out, name, ("```", call_end))
        yield from stream.skip_space()
        if fenced:
            yield from stream.pass_over("```")

    @classmethod
    def grammar(
        cls, tools: Sequence[Tool], parallel: bool, chat_template: str = ""
    ) -> CallGrammar | None:
        section, call, separator, call_end, section_end = cls.markers
        if "```json" in chat_template or separator not in chat_template:
            fence = f"{call}function{separator}{{name}}\n```json\n"
            calls, between = named_shapes(tools, fence, f"\n```{call_end}"), "\n"
        else:
            calls, between = named_shapes(tools, f"{call}{{name}}{separator}", call_end), ""
        return CallGrammar(section, calls, between, section_end, parallel, cls.markers)


class KimiK2(SectionedFormat):
    """`<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`.

    The text before the arguments is the call's id, which the model expects in later turns.
    """

    begins = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    markers = (
        *begins,
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    )
    _ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::(?P<number>\d+))?")

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._used_ids: set[str] = set()

    def _read_call(self, stream: TextStream, out: Emitter) -> Steps[None]:
        _, _, arguments, call_end, _ = self.markers
        head, _ = yield from stream.read_until((arguments,))
        match = self._ID.fullmatch(head.strip())
        name = match["name"] if match is not None else ""
        number = match["number"] if match is not None else None
        call_id = f"functions.{name}:{number or out.next_index}"
        if call_id in self._used_ids:
            call_id = f"functions.{name}:{out.next_index}"
        self._used_ids.add(call_id)
        yield from read_named_call(stream, out, name, (call_end,), call_id)
        yield from stream.skip_space()

    @classmethod
    def grammar(
        cls, tools: Sequence[Tool], parallel: bool, chat_template: str = ""
    ) -> CallGrammar | None:
        section, call, arguments, call_end, section_end = cls.markers
        calls = named_shapes(tools, f"{call}functions.{{name}}:0{arguments}", call_end)
        return CallGrammar(section, calls, "", section_end, parallel, cls.markers)


def object_shapes(
    tools: Sequence[Tool], arguments_key: str, before: str = "", after: str = ""
) -> tuple[CallShape, ...]:
    """One shape per tool: an object with its name and arguments."""
    return tuple(
        CallShape(
            tool.name,
            f'{before}{{"name": {json.dumps(tool.name)}, "{arguments_key}": ',
            arguments_schema(tool),
            f"}}{after}",
        )
        for tool in tools
    )


def named_shapes(tools: Sequence[Tool], prefix: str, suffix: str) -> tuple[CallShape, ...]:
    """One shape per tool: its name in place of `{name}`, then its arguments."""
    return tuple(
        CallShape(tool.name, prefix.replace("{name}", tool.name), arguments_schema(tool), suffix)
        for tool in tools
    )


def arguments_schema(tool: Tool) -> Mapping[str, Any]:
    """A tool's schema. Without declared arguments, it takes none unless it says otherwise."""
    if ARGUMENTS.isdisjoint(tool.parameters):
        return {"type": "object", **tool.parameters, "properties": {}}
    return tool.parameters
