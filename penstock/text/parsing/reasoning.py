"""Reasoning before the answer, between markers.

Whether the output begins within the reasoning depends on the family and on the prompt: many
templates write the opening marker themselves, or write both where thinking is off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.text.parsing.emitter import Emitter
from penstock.text.parsing.formats import ReasoningFormat
from penstock.text.parsing.stream import Steps, Stream


@dataclass(frozen=True)
class ReasoningTags:
    """One family's markers.

    `starts` and `ends` are alternatives, the usual one first. `stops` end the reasoning too, but
    belong to what follows. `begins_open` says that the output starts within the reasoning unless
    the prompt shows otherwise, and `open_by` names template arguments that make it so where the
    prompt is not known. `frame` encloses the answer.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    closing: str
    stops: tuple[str, ...] = ()
    begins_open: bool = False
    open_by: tuple[str, ...] = ()
    frame: tuple[str, str] | None = None

    @property
    def markers(self) -> frozenset[str]:
        return frozenset((*self.starts, *self.ends, *self.stops, *(self.frame or ())))

    @property
    def format(self) -> ReasoningFormat:
        return ReasoningFormat(self.starts[0], self.ends[0], self.closing)

    def is_open(self, prompt: str, continued: str, kwargs: Mapping[str, Any]) -> bool:
        """Whether the output starts within the reasoning."""
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

    def parse(self, stream: Stream, out: Emitter, is_open: bool) -> Steps[None]:
        """Read the reasoning, if there is any. What comes after it is left."""
        space = yield from stream.skip_space()
        started = yield from stream.accept(*self.starts)
        if started is None and not is_open:
            out.content(space)
            return
        out.begin_reasoning()
        marker = yield from stream.until((*self.ends, *self.stops), out.reasoning)
        if marker is None:
            return
        out.end_reasoning(len(marker.encode()))
        if marker in self.stops:
            stream.put_back(marker)
        if self.frame is not None:
            yield from stream.skip_space()
            if (yield from stream.accept(self.frame[0])):
                stream.noise = (self.frame[1],)


_START, _END, _CLOSING = ("<think>",), ("</think>",), "\n</think>\n\n"

DEEPSEEK_R1 = ReasoningTags(_START, _END, _CLOSING, begins_open=True)
DEEPSEEK_V3 = ReasoningTags(_START, _END, _CLOSING, open_by=("thinking", "enable_thinking"))
QWEN3 = ReasoningTags(_START, _END, _CLOSING)
GLM45 = ReasoningTags(_START, _END, closing="</think>\n")
MINIMAX_M2 = ReasoningTags(_START, _END, _CLOSING, begins_open=True)
KIMI_K2 = ReasoningTags(_START, _END, "</think>", stops=("<|tool_calls_section_begin|>",))
MISTRAL = ReasoningTags(("[THINK]",), ("[/THINK]",), closing="[/THINK]")
GRANITE = ReasoningTags(
    ("<think>", "Here is my thought process:", "Here's my thought process:"),
    ("</think>", "Here is my response:", "Here's my response:"),
    closing="</think>",
    frame=("<response>", "</response>"),
)
