"""Families that write calls in tags, a tag for each argument: qwen3_coder, glm45, minimax_m2.

Values are plain text: what they mean is up to the tool's schema (`typed_values`). Where a call is
enforced, these are held to a JSON array in place of their own format.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.text.parsing.emitter import Emitter
from penstock.text.parsing.formats import CallGrammar, Tool
from penstock.text.parsing.stream import Malformed, Steps, Stream, Truncated
from penstock.text.parsing.tool_format import ToolFormat, check_name
from penstock.text.parsing.typed_values import ArgumentsWriter


class TaggedFormat(ToolFormat):
    @classmethod
    def grammar(
        cls, tools: Sequence[Tool], parallel: bool, chat_template: str = ""
    ) -> CallGrammar | None:
        return None

    def _start(self, out: Emitter, name: str) -> ArgumentsWriter:
        name = check_name(name)
        out.start_call(name)
        return ArgumentsWriter(out, self.parameters_of(name))


def read_value(
    stream: Stream, writer: ArgumentsWriter, key: str, closings: tuple[str, ...], *next_tags: str
) -> Steps[None]:
    """An argument's value. A closing tag ends it only if one of `next_tags` follows: a value may
    hold tags itself, such as a file that is to be written."""
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
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, with
    a line break on either side of each value that is not part of it."""

    begins = ("<tool_call>", "<function=")  # the outer tag is sometimes left out
    markers = ("<tool_call>", "</tool_call>")

    def read_calls(self, stream: Stream, out: Emitter, marker: str) -> Steps[None]:
        if marker == "<tool_call>":
            yield from stream.skip_space()
            yield from stream.expect("<function=")
        name, _ = yield from stream.read_until((">",))
        writer = self._start(out, name)
        while True:
            yield from stream.skip_space()
            if (yield from stream.expect("<parameter=", "</function>")) == "</function>":
                break
            key, _ = yield from stream.read_until((">",))
            yield from stream.accept("\n")
            closings = ("\n</parameter>", "</parameter>")
            yield from read_value(stream, writer, key, closings, "<parameter=", "</function>")
        writer.end()
        out.end_call()
        yield from stream.skip_space()
        yield from stream.pass_over("</tool_call>")


class Glm45(TaggedFormat):
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`."""

    begins = ("<tool_call>",)
    markers = (
        "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    )  # fmt: skip

    def read_calls(self, stream: Stream, out: Emitter, marker: str) -> Steps[None]:
        yield from stream.skip_space()
        name, after = yield from stream.read_until(("\n", "<arg_key>", "</tool_call>"))
        stream.put_back(after)
        writer = self._start(out, name)
        while True:
            yield from stream.skip_space()
            if (yield from stream.expect("<arg_key>", "</tool_call>")) == "</tool_call>":
                break
            key, _ = yield from stream.read_until(("</arg_key>",))
            yield from stream.skip_space()
            yield from stream.expect("<arg_value>")
            yield from read_value(
                stream, writer, key, ("</arg_value>",), "<arg_key>", "</tool_call>"
            )
        writer.end()
        out.end_call()


class MiniMaxM2(TaggedFormat):
    """`<minimax:tool_call><invoke name="name"><parameter name="key">value</parameter></invoke>
    </minimax:tool_call>`, with an `invoke` for each call."""

    begins = ("<minimax:tool_call>",)
    markers = ("<minimax:tool_call>", "</minimax:tool_call>")

    def read_calls(self, stream: Stream, out: Emitter, marker: str) -> Steps[None]:
        yield from stream.skip_space()
        after = yield from stream.expect("<invoke name=")
        while after == "<invoke name=":
            name, _ = yield from stream.read_until((">",))
            yield from self._read_call(stream, out, _unquoted(name))
            yield from stream.skip_space()
            after = yield from stream.expect("<invoke name=", "</minimax:tool_call>")

    def _read_call(self, stream: Stream, out: Emitter, name: str) -> Steps[None]:
        writer = self._start(out, name)
        while True:
            yield from stream.skip_space()
            if (yield from stream.expect("<parameter name=", "</invoke>")) == "</invoke>":
                break
            key, _ = yield from stream.read_until((">",))
            yield from read_value(
                stream, writer, _unquoted(key), ("</parameter>",), "<parameter name=", "</invoke>"
            )
        writer.end()
        out.end_call()


def _unquoted(attribute: str) -> str:
    attribute = attribute.strip()
    if len(attribute) < 2 or attribute[0] != attribute[-1] or attribute[0] not in "\"'":
        raise Malformed(f"{attribute!r:.40} must be in quotes")
    return attribute[1:-1]
