"""Families that write calls in tags, one per argument: qwen3_coder, glm45, minimax_m2.

Values are plain text; the tool's schema determines their types (`typed_values`). Enforced calls use
a JSON array instead of the native format.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from penstock.text.parsing.emitter import Emitter
from penstock.text.parsing.stream import Malformed, Steps, TextStream, Truncated
from penstock.text.parsing.tool_format import ToolFormat, check_name
from penstock.text.parsing.typed_values import ArgumentsWriter


class TaggedFormat(ToolFormat):
    """A call's arguments, each after an `argument` tag, up to the tag `call_end`."""

    argument: ClassVar[str]
    call_end: ClassVar[str]

    def _read_call(self, stream: TextStream, out: Emitter, name: str) -> Steps[None]:
        name = check_name(name)
        out.start_call(name)
        writer = ArgumentsWriter(out, self.parameters_of(name))
        while True:
            yield from stream.skip_space()
            if (yield from stream.expect(self.argument, self.call_end)) == self.call_end:
                break
            yield from self._read_argument(stream, writer)
        writer.end()
        out.end_call()

    @abstractmethod
    def _read_argument(self, stream: TextStream, writer: ArgumentsWriter) -> Steps[None]:
        """Read an argument after its tag."""

    def _read_value(
        self, stream: TextStream, writer: ArgumentsWriter, key: str, *closings: str
    ) -> Steps[None]:
        """Read a value. Its closing tag counts only before another argument or the call's end.

        A value may contain tags itself, such as a file to be written.
        """
        next_tags = (self.argument, self.call_end)
        writer.begin_value(key)
        while True:
            closing = yield from stream.until(closings, writer.add, drop_partial=True)
            if closing is None:
                raise Truncated
            space = yield from stream.skip_space()
            if (yield from stream.next_is(*next_tags)):
                writer.end_value()
                return
            if (yield from stream.goes_on_with(*next_tags)):
                raise Truncated
            writer.add(closing + space)


class Qwen3Coder(TaggedFormat):
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

    A line break on either side of each value is not part of it.
    """

    begins = ("<tool_call>", "<function=")  # the outer tag is sometimes missing
    markers = ("<tool_call>", "</tool_call>")
    argument, call_end = "<parameter=", "</function>"

    def read_calls(self, stream: TextStream, out: Emitter, marker: str) -> Steps[None]:
        if marker == "<tool_call>":
            yield from stream.skip_space()
            yield from stream.expect("<function=")
        name, _ = yield from stream.read_until((">",))
        yield from self._read_call(stream, out, name)
        yield from stream.skip_space()
        yield from stream.pass_over("</tool_call>")

    def _read_argument(self, stream: TextStream, writer: ArgumentsWriter) -> Steps[None]:
        key, _ = yield from stream.read_until((">",))
        yield from stream.accept("\n")
        yield from self._read_value(stream, writer, key, "\n</parameter>", "</parameter>")


class Glm45(TaggedFormat):
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`."""

    begins = ("<tool_call>",)
    markers = (
        "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    )  # fmt: skip
    argument, call_end = "<arg_key>", "</tool_call>"

    def read_calls(self, stream: TextStream, out: Emitter, marker: str) -> Steps[None]:
        yield from stream.skip_space()
        name, after = yield from stream.read_until(("\n", self.argument, self.call_end))
        stream.put_back(after)
        yield from self._read_call(stream, out, name)

    def _read_argument(self, stream: TextStream, writer: ArgumentsWriter) -> Steps[None]:
        key, _ = yield from stream.read_until(("</arg_key>",))
        yield from stream.skip_space()
        yield from stream.expect("<arg_value>")
        yield from self._read_value(stream, writer, key, "</arg_value>")


class MiniMaxM2(TaggedFormat):
    """`<invoke name="name"><parameter name="key">value</parameter></invoke>`.

    `<minimax:tool_call>` and its end tag enclose all calls, with an `invoke` for each.
    """

    begins = ("<minimax:tool_call>",)
    markers = ("<minimax:tool_call>", "</minimax:tool_call>")
    argument, call_end = "<parameter name=", "</invoke>"

    def read_calls(self, stream: TextStream, out: Emitter, marker: str) -> Steps[None]:
        yield from stream.skip_space()
        after = yield from stream.expect("<invoke name=")
        while after == "<invoke name=":
            name, _ = yield from stream.read_until((">",))
            yield from self._read_call(stream, out, _unquoted(name))
            yield from stream.skip_space()
            after = yield from stream.expect("<invoke name=", "</minimax:tool_call>")

    def _read_argument(self, stream: TextStream, writer: ArgumentsWriter) -> Steps[None]:
        key, _ = yield from stream.read_until((">",))
        yield from self._read_value(stream, writer, _unquoted(key), "</parameter>")


def _unquoted(attribute: str) -> str:
    attribute = attribute.strip()
    if len(attribute) < 2 or attribute[0] != attribute[-1] or attribute[0] not in "\"'":
        raise Malformed(f"{attribute!r:.40} must be in quotes")
    return attribute[1:-1]
