"""The base of all tool-call formats."""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from penstock.text.parsing.emitter import Emitter
from penstock.text.parsing.formats import CallGrammar, Tool
from penstock.text.parsing.stream import Malformed, Steps, TextStream, Truncated

_NAME = re.compile(r"""[^\s<>{}()\[\]"'`|]{1,256}""")


class Interludes:
    """What may come between parts of the content besides calls. Here: nothing."""

    markers: tuple[str, ...] = ()

    def read(self, stream: TextStream, out: Emitter, marker: str) -> Steps[None]:
        """Read what `marker`, which was just read, begins."""
        raise AssertionError("no marker begins anything")


class ToolFormat(ABC):
    """Reads content and calls in one family's format.

    `begins` are the markers of a call or a section of calls. `markers` are all markers that may be
    special tokens.
    """

    begins: ClassVar[tuple[str, ...]] = ()
    markers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self.interludes = Interludes()

    def parse(self, stream: TextStream, out: Emitter) -> Steps[None]:
        """Parse up to the end of the output."""
        while True:
            markers = (*self.begins, *self.interludes.markers)
            own = (*self.begins, *self.markers)
            marker = yield from stream.until(markers, out.content, cut_markers=own)
            if marker is None:
                return
            if marker in self.begins:
                yield from self._attempt(stream, out, marker)
            else:
                yield from self.interludes.read(stream, out, marker)

    def _attempt(
        self, stream: TextStream, out: Emitter, marker: str, promised: bool = True
    ) -> Steps[None]:
        """Read what `marker` began. If it is not a call, it becomes text, including the marker.

        Unless a call was `promised`, an output without one is not reported. What `max_tokens` cut
        off is the beginning of a call. It is not text, even if the call is not certain yet.
        """
        stream.record(marker)
        try:
            yield from self.read_calls(stream, out, marker)
        except Malformed as malformed:
            why = str(malformed) if promised or out.in_call else None
            out.fail(stream.stop_recording(), why)
        except Truncated:
            if stream.is_whole and not out.in_call:
                out.content(stream.stop_recording())
                return
            stream.take_rest()
            text = stream.stop_recording()
            if stream.is_whole:  # the client did not cut the call off
                out.fail(text, "the output ends within it")
            elif not out.in_call and not self.may_begin_call(text):
                out.content(text)
        else:
            stream.stop_recording()

    def attempt_in_reasoning(
        self, stream: TextStream, out: Emitter, marker: str, ends: tuple[str, ...]
    ) -> Steps[None]:
        """Read what `marker` began inside the reasoning, up to one of `ends`, which stay unread.

        Models sometimes forget to end their reasoning before they call, and they also reason about
        calls. A complete call of an offered tool counts. Anything else is reasoning, and so is the
        text after a call.
        """
        start = stream.num_bytes_read - len(marker.encode())
        thought = TextStream()
        trial = out.trial(thought, self._tools)
        thought.record(marker)
        calls, is_malformed = self.read_calls(thought, trial, marker), False
        while True:
            try:
                next(calls)
            except StopIteration:
                break
            except (Malformed, Truncated):
                is_malformed = True
                break
            text = yield from stream.text_before(ends)
            thought.push(text)
            thought.ended = not text
        rest = thought.stop_recording() if is_malformed else ""
        stream.put_back(thought.take_rest())
        out.adopt(trial, stream.num_bytes_read - start)
        out.reasoning(rest)

    def may_begin_call(self, text: str) -> bool:
        """Whether `text`, in which no call has begun yet, can still become one."""
        return True

    @abstractmethod
    def read_calls(self, stream: TextStream, out: Emitter, marker: str) -> Steps[None]:
        """Read the calls that `marker`, which was just read, begins."""

    @classmethod
    def grammar(
        cls, tools: Sequence[Tool], parallel: bool, chat_template: str = ""
    ) -> CallGrammar | None:
        """The form of calls; None if they are not JSON. `chat_template` shows the dialect."""
        return None

    @staticmethod
    def new_call_id() -> str:
        return f"call_{secrets.token_hex(12)}"

    def parameters_of(self, name: str) -> Mapping[str, Any]:
        """The schema of a tool's arguments; {} for a tool that was not offered."""
        tool = self._tools.get(name)
        return tool.parameters if tool is not None else {}


class PlainText(ToolFormat):
    """No calls: everything is content."""

    def read_calls(self, stream: TextStream, out: Emitter, marker: str) -> Steps[None]:
        raise AssertionError("no marker begins a call")


class UnmarkedFormat(ToolFormat):
    """Calls that may begin without a marker, at the start of the output.

    Since nothing marks a call, only offered tools can be called. Anything else is an answer. Calls
    begin with one of `openings`; `name_begun` finds the beginning of a function's name at a text's
    end.
    """

    openings: ClassVar[tuple[str, ...]]
    name_begun: ClassVar[re.Pattern[str]]

    def parse(self, stream: TextStream, out: Emitter) -> Steps[None]:
        out.content((yield from stream.skip_space()))
        if (yield from stream.next_is(*self.openings)):
            yield from self._attempt(stream, out, "", promised=False)
        yield from super().parse(stream, out)

    def may_begin_call(self, text: str) -> bool:
        named = self.name_begun.search(text)
        return named is None or any(name.startswith(named[1]) for name in self._tools)


def check_name(name: object) -> str:
    """The name of a function. Raises Malformed if it cannot be one."""
    if isinstance(name, str):
        name = name.strip()
        if _NAME.fullmatch(name) and name.isprintable():
            return name
    raise Malformed(f"{name!r:.40} is not a function name")
