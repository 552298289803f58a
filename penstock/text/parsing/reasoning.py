"""Parses reasoning between markers: before the answer, and again within it.

Whether the output begins inside the reasoning depends on the family and the prompt. Many templates
write the opening marker themselves, or write both if thinking is off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.text.parsing.emitter import Emitter
from penstock.text.parsing.formats import ReasoningFormat
from penstock.text.parsing.stream import Steps, TextStream
from penstock.text.parsing.tool_format import Interludes, ToolFormat

QUOTES = ("`", '"', "'")
FENCE = "```"


@dataclass(frozen=True)
class ReasoningTags:
    """One family's markers.

    `starts` and `ends` are dialects, the usual one first. `closing` ends the reasoning when a
    budget is spent; `{}` in it is the dialect's end. `begins_open` means that the output starts
    inside the reasoning unless the prompt shows otherwise. `open_by` names template arguments that
    have this effect if the prompt is unknown. `frame` encloses the answer.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    closing: str
    begins_open: bool = False
    open_by: tuple[str, ...] = ()
    frame: tuple[str, ...] = ()

    @property
    def markers(self) -> frozenset[str]:
        return frozenset((*self.starts, *self.ends, *self.frame))

    def format(self, chat_template: str = "") -> ReasoningFormat:
        """The format in the dialect that `chat_template` uses, if it shows one."""
        shown = (at for at, start in enumerate(self.starts) if start in chat_template)
        at = next(shown, 0)
        return ReasoningFormat(
            start=self.starts[at],
            end=self.ends[at],
            closing=self.closing.replace("{}", self.ends[at]),
            other_starts=tuple(start for start in self.starts if start != self.starts[at]),
            other_ends=tuple(end for end in self.ends if end != self.ends[at]),
        )

    def is_open(self, prompt: str, continued: str, kwargs: Mapping[str, Any]) -> bool:
        """Whether the output starts inside the reasoning."""
        if continued:
            last_start = max(continued.rfind(start) for start in self.starts)
            return last_start > max(continued.rfind(end) for end in self.ends)
        prompt = prompt.rstrip()
        if prompt.endswith(self.ends):
            return False
        if prompt.endswith(self.starts):
            return True
        if not prompt and any(kwargs.get(name) for name in self.open_by):
            return True
        return self.begins_open

    def parse(
        self, stream: TextStream, out: Emitter, is_open: bool, tools: ToolFormat
    ) -> Steps[bool]:
        """Read the reasoning before the answer, if any. Returns whether `frame` has begun."""
        space = yield from stream.skip_space()
        started = yield from stream.accept(*self.starts)
        if started is None and not is_open:
            if not stream.drop_cut(self.starts[0]):
                out.content(space)
            return False
        yield from self.think(stream, out, tools)
        if not self.frame:
            return False
        yield from stream.skip_space()
        is_framed = (yield from stream.accept(self.frame[0])) is not None
        stream.drop_cut(self.frame[0])
        return is_framed

    def think(self, stream: TextStream, out: Emitter, tools: ToolFormat) -> Steps[None]:
        """Read reasoning that has begun, up to and including its end marker."""
        out.begin_reasoning()
        while True:
            marker = yield from stream.until((*self.ends, *tools.begins), out.reasoning)
            if marker is None:
                return
            if marker in self.ends:
                out.end_reasoning(len(marker.encode()))
                return
            yield from tools.attempt_in_reasoning(stream, out, marker, self.ends)

    def later(self, tools: ToolFormat, is_free: bool, is_framed: bool) -> Interludes:
        """What may interrupt the answer: only the frame's end, unless it `is_free`."""
        return LaterReasoning(self, tools, is_free, is_framed)


class LaterReasoning(Interludes):
    """Reasoning after the answer has begun, if the answer `is_free`, and the frame's end.

    A start marker that is only mentioned is text: one after a quotation mark, or in a code block.
    """

    def __init__(
        self, tags: ReasoningTags, tools: ToolFormat, is_free: bool, is_framed: bool
    ) -> None:
        self._tags = tags
        self._tools = tools
        self._start = tags.starts[0]  # other dialects start with words that an answer may contain
        self._in_code = False
        quoted = [f"{quote}{self._start}" for quote in QUOTES]
        later = (self._start, FENCE, *quoted) if is_free else ()
        self.markers = (*later, *(tags.frame[1:] if is_framed else ()))

    def read(self, stream: TextStream, out: Emitter, marker: str) -> Steps[None]:
        if marker in self._tags.frame:
            return
        if marker == self._start and not self._in_code:
            yield from self._tags.think(stream, out, self._tools)
            return
        if marker == FENCE:
            self._in_code = not self._in_code
        out.content(marker)


_START, _END, _CLOSING = ("<think>",), ("</think>",), "\n{}\n\n"

DEEPSEEK_R1 = ReasoningTags(_START, _END, _CLOSING, begins_open=True)
DEEPSEEK_V3 = ReasoningTags(_START, _END, _CLOSING, open_by=("thinking", "enable_thinking"))
QWEN3 = ReasoningTags(_START, _END, _CLOSING)
GLM45 = ReasoningTags(_START, _END, closing="{}\n")
MINIMAX_M2 = ReasoningTags(_START, _END, _CLOSING, begins_open=True)
KIMI_K2 = ReasoningTags(_START, _END, closing="{}")
MISTRAL = ReasoningTags(("[THINK]",), ("[/THINK]",), closing="{}")
GRANITE = ReasoningTags(
    ("<think>", "Here is my thought process:", "Here's my thought process:"),
    ("</think>", "Here is my response:", "Here's my response:"),
    closing="\n\n{}",
    frame=("<response>", "</response>"),
)
