"""Parses OpenAI's harmony format (gpt-oss): a sequence of messages, each with a header.

`<|channel|>analysis<|message|>...<|end|>` is reasoning, and the channel `final` is the answer. A
message in `commentary` to `functions.name` is a call. Commentary without a recipient is meant for
the user.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from penstock.text.parsing.emitter import Emitter
from penstock.text.parsing.formats import CallGrammar, ReasoningFormat, Tool
from penstock.text.parsing.json_calls import read_named_call
from penstock.text.parsing.json_families import named_shapes
from penstock.text.parsing.stream import Malformed, Steps, TextStream, Truncated
from penstock.text.parsing.tool_format import ToolFormat

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
FOR_THE_USER = ("final", "commentary")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_RECIPIENT_BEGUN = re.compile(r"\s*(?:t|to|to=\S*)?")
_CHANNEL = re.compile(
    r"<\|channel\|>\s*(?P<name>\w+)"
    # The marker may be missing.
    r"|\A\s*(?:<\|start\|>\w*)?\s*(?P<bare>analysis|commentary|final)\s*(?=<\||\Z)"
)
_WORD = re.compile(r"\s{0,32}\w{0,32}")
_ROLE = re.compile(r"\A\s*<\|start\|>\w*")
_MARKERS = re.compile(r"<\|(?:start|channel|constrain)\|>")

FORMAT = ReasoningFormat(
    start=f"{CHANNEL}analysis{MESSAGE}",
    end="<|end|>",
    closing=f"<|end|>{START}assistant{CHANNEL}final{MESSAGE}",
    answer_prefix=f"{START}assistant{CHANNEL}final{MESSAGE}",
)


class Harmony(ToolFormat):
    """Reads the whole output, including reasoning; calls only if tools were offered.

    A message without a channel continues the channel of the previous message. Text without a header
    is the answer. An unfinished header counts for what it contains.
    """

    markers = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
    _name = ""  # tool that the current message calls
    _channel = "final"  # of the current message

    def parse(self, stream: TextStream, out: Emitter) -> Steps[None]:
        """The prompt ends with `<|start|>assistant`, so the output begins inside a header."""
        while True:
            stream.record()
            try:
                marker = yield from self._read_header(stream)
            except Malformed:
                marker = ""  # text follows
            except Truncated:
                text = stream.stop_recording() + stream.take_rest()
                is_cut = not stream.is_whole and (
                    _RECIPIENT_BEGUN.fullmatch(text)
                    or any(marker.startswith(text.strip()) for marker in self.markers)
                )
                if not is_cut and not any(marker in text for marker in self.markers):
                    self._say(out, text)  # otherwise it begins a header
                return
            header = stream.stop_recording().removesuffix(marker)
            if not marker and header.endswith(CHANNEL):
                header += stream.take_match(_WORD)
            yield from self._read_message(stream, out, header, marker)
            yield from stream.skip_space()
            if stream.ended and not (yield from stream.peek()):
                return

    def _read_header(self, stream: TextStream) -> Steps[str]:
        """Read a header and its end marker, which should be that of a message."""
        yield from stream.skip_space()
        yield from stream.accept(START)
        while True:
            _, marker = yield from stream.read_until(self.markers)
            if marker == MESSAGE or marker in ENDS:
                return marker

    def _read_message(
        self, stream: TextStream, out: Emitter, header: str, marker: str | None
    ) -> Steps[None]:
        if channel := _CHANNEL.search(header):
            self._channel = channel["name"] or channel["bare"]
        if marker != MESSAGE:  # the rest of the header was meant as the message
            text = _CHANNEL.sub("", header, count=1) if channel else _ROLE.sub("", header)
            self._say(out, _MARKERS.sub("", text))
        if marker in ENDS:
            return
        name = self._called(header)
        if name is not None:
            yield from self._read_call(stream, out, name)
        elif self._channel in FOR_THE_USER:
            marker = yield from stream.until((*ENDS, START), out.content, cut_markers=self.markers)
            _put_back_start(stream, marker)
        else:
            out.begin_reasoning()
            end = yield from stream.until((*ENDS, START), out.reasoning)
            if end is not None:
                out.end_reasoning(len(end))
            _put_back_start(stream, end)

    def _say(self, out: Emitter, text: str) -> None:
        """Emit text outside of messages. It belongs to the current channel."""
        if self._channel in FOR_THE_USER:
            out.content(text)
        elif text:
            out.begin_reasoning()
            out.reasoning(text)
            out.end_reasoning()

    def _called(self, header: str) -> str | None:
        """The tool that a message with this header calls."""
        recipient = _RECIPIENT.search(header)
        if recipient is None or not self._tools:
            return None
        name = recipient[1].removeprefix("functions.")
        return name if name != recipient[1] or name in self._tools else None

    def _read_call(self, stream: TextStream, out: Emitter, name: str) -> Steps[None]:
        self._name = name
        yield from self._attempt(stream, out, "")
        # Empty in well-formed output.
        marker = yield from stream.until((*ENDS, START), out.content, cut_markers=self.markers)
        _put_back_start(stream, marker)

    def read_calls(self, stream: TextStream, out: Emitter, marker: str) -> Steps[None]:
        yield from read_named_call(stream, out, self._name, ENDS)

    @classmethod
    def grammar(
        cls, tools: Sequence[Tool], parallel: bool, chat_template: str = ""
    ) -> CallGrammar | None:
        """One call, since `<|call|>` ends the output."""
        prefix = f"{CHANNEL}commentary to=functions.{{name}} {CONSTRAIN}json{MESSAGE}"
        calls = named_shapes(tools, prefix, "<|call|>")
        return CallGrammar(f"{START}assistant", calls, "", "", False, cls.markers)


def _put_back_start(stream: TextStream, marker: str | None) -> None:
    """A new message ends the previous one, even if that was left open."""
    if marker == START:
        stream.put_back(START)
