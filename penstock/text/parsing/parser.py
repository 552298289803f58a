"""Parsers of model output: the interface, their names, and which one a chat template needs.

An output is some reasoning, then content and tool calls. Each family has its own way to write
them; a parser turns text, as it arrives, into typed deltas. How the text is split into pieces
makes no difference to what the deltas add up to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from penstock.text.parsing.deltas import Delta
from penstock.text.parsing.formats import CallGrammar, ReasoningFormat, Tool


class OutputParser(Protocol):
    """Parses one output (one completion); made anew for each."""

    @property
    def markers(self) -> frozenset[str]:
        """Texts that this parser must see although they may be special tokens."""

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the detokenizer must show special tokens (at least those in `markers`)."""

    @property
    def num_reasoning_tokens(self) -> int:
        """How many of the tokens fed so far were reasoning; its markers do not count."""

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next is still reasoning (or may be)."""

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Delta]:
        """What became certain with `text`, which the detokenizer gave for `token_ids`.

        Either may be empty: text may come later than its tokens.
        """

    def finish(self) -> list[Delta]:
        """What was held back, as the output has ended. Nothing may be fed after it."""


@dataclass(frozen=True)
class ParserContext:
    """What is known about a request besides its output.

    `prompt` is the rendered prompt, or its last lines: it says whether the template has opened
    the reasoning already. `continued` is the unfinished assistant message at the prompt's end that
    the output goes on with. `token_bytes` gives the bytes that a token adds to the text fed (none
    for a hidden token); without it, reasoning tokens are counted by the share of text.
    """

    prompt: str = ""
    continued: str = ""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    token_bytes: Callable[[int], bytes] | None = None
    new_call_id: Callable[[], str] | None = None  # for tests; else the family's own way


class Detected(NamedTuple):
    """Names of parsers, None where the template does not tell."""

    reasoning: str | None
    tools: str | None


def make_output_parser(
    reasoning: str | None,
    tools: str | None,
    *,
    tools_offered: Sequence[Tool] = (),
    context: ParserContext | None = None,
    enforced: bool = False,
) -> OutputParser:
    """The parser for one output. Names are those of REASONING_PARSERS and TOOL_PARSERS.

    Without `tools_offered` nothing is taken for a call. `enforced` says that the output follows
    `call_grammar(tools, ...)` (tool_choice required or named), which for some families is not
    the form they write by themselves. ConfigError for a name that does not exist.
    """
    raise NotImplementedError


def call_grammar(tools: str, tools_offered: Sequence[Tool], parallel: bool) -> CallGrammar:
    """What the output must look like where a call is required; one named tool: offer only it.

    Families that do not write JSON (pythonic, qwen3_coder, glm45, minimax_m2) are held to a JSON
    array of objects with name and parameters, which make_output_parser(enforced=True) reads.
    """
    raise NotImplementedError


def reasoning_format(reasoning: str) -> ReasoningFormat:
    """The markers of the reasoning parser called `reasoning`."""
    raise NotImplementedError


def thinking_is_open(reasoning: str, context: ParserContext) -> bool:
    """Whether the prompt has begun the reasoning, so that the output starts in its middle."""
    raise NotImplementedError


def detect(chat_template: str) -> Detected:
    """The parsers that `chat_template` needs, where it is unmistakable."""
    raise NotImplementedError
