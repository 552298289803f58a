"""The interface of output parsers, their names, and the parser for each request.

An output is reasoning, then content and tool calls. Each family writes them in its own way. A
parser turns text, as it arrives, into typed deltas. How the text is split into pieces does not
affect the sum of the deltas.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from penstock.protocol.errors import ConfigError
from penstock.text.parsing.deltas import ContentDelta, Delta
from penstock.text.parsing.detect import Detected, detect
from penstock.text.parsing.emitter import Emitter
from penstock.text.parsing.formats import CallGrammar, ReasoningFormat, Tool
from penstock.text.parsing.stream import Steps, TextStream

if TYPE_CHECKING:
    from penstock.text.parsing.reasoning import ReasoningTags
    from penstock.text.parsing.tool_format import ToolFormat

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "Detected",
    "OutputParser",
    "ParserContext",
    "call_grammar",
    "check_names",
    "detect",
    "make_output_parser",
    "reasoning_format",
    "thinking_is_open",
    "writes_json",
]

_HERE = "penstock.text.parsing"
HARMONY = "openai"  # reads reasoning and calls together: messages, not markers

TOOL_PARSERS: Mapping[str, str] = {
    "deepseek_v3": "json_families:DeepSeekV3",
    "glm45": "tagged_families:Glm45",
    "granite": "json_families:Granite",
    "hermes": "json_families:Hermes",
    "json": "json_families:BareJson",
    "kimi_k2": "json_families:KimiK2",
    "llama3_json": "json_families:Llama3Json",
    "minimax_m2": "tagged_families:MiniMaxM2",
    "mistral": "json_families:Mistral",
    HARMONY: "harmony:Harmony",
    "pythonic": "pythonic:Pythonic",
    "qwen3_coder": "tagged_families:Qwen3Coder",
}
REASONING_PARSERS: Mapping[str, str] = {
    "deepseek_r1": "reasoning:DEEPSEEK_R1",
    "deepseek_v3": "reasoning:DEEPSEEK_V3",
    "glm45": "reasoning:GLM45",
    "granite": "reasoning:GRANITE",
    "kimi_k2": "reasoning:KIMI_K2",
    "minimax_m2": "reasoning:MINIMAX_M2",
    "mistral": "reasoning:MISTRAL",
    "openai_gptoss": "harmony:FORMAT",
    "qwen3": "reasoning:QWEN3",
}


class OutputParser(Protocol):
    """Parses one output (one completion). Each output needs a new parser."""

    @property
    def markers(self) -> frozenset[str]:
        """Texts that this parser must see even if they are special tokens."""

    @property
    def num_reasoning_tokens(self) -> int:
        """Reasoning tokens so far, without the markers."""

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Delta]:
        """The deltas that became certain with `text`, the detokenizer's output for `token_ids`.

        Either may be empty: text may come later than its tokens.
        """

    def finish(self, is_whole: bool = False) -> list[Delta]:
        """The rest of the deltas, after the output's end. Nothing may be fed afterwards.

        An incomplete call is malformed if the output `is_whole`, otherwise it is cut off.
        """


@dataclass(frozen=True)
class ParserContext:
    """What is known about a request besides its output.

    `prompt` is the rendered prompt, or its last lines: it shows whether the template opened the
    reasoning. `continued` is the unfinished assistant message at the prompt's end that the output
    continues. `token_bytes` returns the bytes that a token adds to the text (none for a hidden
    token). Without it, reasoning tokens are estimated by the share of text.
    """

    prompt: str = ""
    continued: str = ""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    token_bytes: Callable[[int], bytes] | None = None
    new_call_id: Callable[[], str] | None = None  # for tests; else the family's own


def make_output_parser(
    reasoning: str | None,
    tools: str | None,
    *,
    tools_offered: Sequence[Tool] = (),
    context: ParserContext | None = None,
    enforced: bool = False,
    is_free: bool = True,
) -> OutputParser:
    """The parser of one output. Names are those of REASONING_PARSERS and TOOL_PARSERS.

    Without `tools_offered`, nothing is parsed as a call. `enforced` means that the output follows
    `call_grammar(tools, ...)` (tool_choice required or named). For some families that is not their
    native format. An answer that is not `is_free`, but constrained to a format, is all content: it
    contains no further reasoning. Raises ConfigError for unknown names and for parsers that do not
    work together.
    """
    check_names(reasoning, tools)
    context = context or ParserContext()
    if reasoning == "openai_gptoss" or tools == HARMONY:
        return StreamParser(None, _tool_format(HARMONY)(tools_offered), context, is_free)
    tags: ReasoningTags | None = _load(REASONING_PARSERS[reasoning]) if reasoning else None
    if tools is None or not tools_offered:
        if tags is None:
            return ContentParser()
        from penstock.text.parsing.tool_format import PlainText

        return StreamParser(tags, PlainText(()), context, is_free)
    family = _tool_format(tools)
    if enforced and family.grammar(tools_offered, parallel=True) is None:
        family = _tool_format("json")
    return StreamParser(tags, family(tools_offered), context, is_free and not enforced)


def check_names(reasoning: str | None, tools: str | None) -> None:
    """Raise ConfigError unless parsers of these names exist and work together."""
    if reasoning is not None and reasoning not in REASONING_PARSERS:
        raise ConfigError(
            f"there is no reasoning parser {reasoning!r}: it must be one of "
            f"{', '.join(REASONING_PARSERS)}"
        )
    if tools is not None and tools not in TOOL_PARSERS:
        raise ConfigError(
            f"there is no tool-call parser {tools!r}: it must be one of {', '.join(TOOL_PARSERS)}"
        )
    harmony = (reasoning == "openai_gptoss", tools == HARMONY)
    if any(harmony) and not all(harmony) and None not in (reasoning, tools):
        raise ConfigError(
            f"reasoning parser {reasoning!r} and tool-call parser {tools!r} do not go together: "
            f"openai_gptoss needs {HARMONY}, and the other way round"
        )


def call_grammar(
    tools: str, tools_offered: Sequence[Tool], parallel: bool, chat_template: str = ""
) -> CallGrammar:
    """The form of an output that must be a call. To require one tool, offer only that tool.

    After reasoning, it applies from the end of the reasoning on. Families with dialects (mistral,
    deepseek_v3) look at `chat_template`. Families that do not write JSON (pythonic, qwen3_coder,
    glm45, minimax_m2) must write a JSON array of objects with name and parameters, which
    `make_output_parser(enforced=True)` reads.
    """
    check_names(None, tools)
    grammar = _tool_format(tools).grammar(tools_offered, parallel, chat_template)
    if grammar is None:
        grammar = _tool_format("json").grammar(tools_offered, parallel)
    assert grammar is not None
    return grammar


def writes_json(tools: str) -> bool:
    """Whether the family's native calls have JSON arguments."""
    return _tool_format(tools).grammar((), parallel=True) is not None


def reasoning_format(reasoning: str, chat_template: str = "") -> ReasoningFormat:
    """The markers of the parser `reasoning`.

    granite has dialects, which `chat_template` distinguishes.
    """
    found = _reasoning(reasoning)
    return found if isinstance(found, ReasoningFormat) else found.format(chat_template)


def thinking_is_open(reasoning: str, context: ParserContext) -> bool:
    """Whether the prompt opened the reasoning, so that the output starts inside it."""
    found = _reasoning(reasoning)
    return not isinstance(found, ReasoningFormat) and _is_open(found, context)


def _reasoning(name: str) -> ReasoningTags | ReasoningFormat:
    """The markers; for harmony, which has its own parser, only their description."""
    check_names(name, None)
    found: ReasoningTags | ReasoningFormat = _load(REASONING_PARSERS[name])
    return found


def _is_open(tags: ReasoningTags, context: ParserContext) -> bool:
    return tags.is_open(context.prompt, context.continued, context.template_kwargs)


def _tool_format(name: str) -> type[ToolFormat]:
    family: type[ToolFormat] = _load(TOOL_PARSERS[name])
    return family


def _load(place: str) -> Any:
    module, name = place.split(":")
    return getattr(import_module(f"{_HERE}.{module}"), name)


class ContentParser:
    """Without reasoning and calls: everything is content."""

    markers: frozenset[str] = frozenset()
    num_reasoning_tokens = 0

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Delta]:
        return [ContentDelta(text)] if text else []

    def finish(self, is_whole: bool = False) -> list[Delta]:
        return []


class StreamParser:
    """Runs a reasoning format, then a tool format over one stream."""

    def __init__(
        self,
        reasoning: ReasoningTags | None,
        tools: ToolFormat,
        context: ParserContext,
        is_free: bool,
    ) -> None:
        self.markers = frozenset(tools.markers) | (reasoning.markers if reasoning else frozenset())
        self._token_bytes = context.token_bytes
        self._stream = TextStream()
        self._out = Emitter(self._stream, context.new_call_id or tools.new_call_id)
        self._token_offsets: list[int] = []  # in bytes: start of each token in the text
        self._num_bytes_fed = 0
        self._num_reasoning_tokens = 0  # of finished spans
        self._steps = self._parse(reasoning, tools, context, is_free)

    def _parse(
        self,
        reasoning: ReasoningTags | None,
        tools: ToolFormat,
        context: ParserContext,
        is_free: bool,
    ) -> Steps[None]:
        stream, out = self._stream, self._out
        if reasoning is not None:
            is_open = _is_open(reasoning, context)
            is_framed = yield from reasoning.parse(stream, out, is_open, tools)
            tools.interludes = reasoning.later(tools, is_free, is_framed)
        yield from tools.parse(stream, out)

    @property
    def num_reasoning_tokens(self) -> int:
        offsets, spans = self._token_offsets, self._out.reasoning_spans
        while spans and (end := spans[0][1]) is not None:
            begin, _ = spans.popleft()
            self._num_reasoning_tokens += bisect_left(offsets, end) - bisect_left(offsets, begin)
        running = len(offsets) - bisect_left(offsets, spans[0][0]) if spans else 0
        return self._num_reasoning_tokens + running

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Delta]:
        self._place_tokens(text, token_ids)
        self._stream.push(text)
        next(self._steps, None)
        return self._out.drain()

    def finish(self, is_whole: bool = False) -> list[Delta]:
        self._stream.ended, self._stream.is_whole = True, is_whole
        next(self._steps, None)
        self._out.finish()
        return self._out.drain()

    def _place_tokens(self, text: str, token_ids: Sequence[int]) -> None:
        if self._token_bytes is None:
            size = len(text.encode())
            for index in range(len(token_ids)):
                self._token_offsets.append(self._num_bytes_fed + size * index // len(token_ids))
            self._num_bytes_fed += size
            return
        for token_id in token_ids:
            if size := len(self._token_bytes(token_id)):
                self._token_offsets.append(self._num_bytes_fed)
                self._num_bytes_fed += size
