"""Describes how a model family writes calls and reasoning.

The renderer and the grammar compiler use these descriptions. Parsers read the output itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    description: str = ""


@dataclass(frozen=True)
class CallShape:
    """A call of the tool `name` as text: `prefix`, JSON that satisfies `schema`, `suffix`."""

    name: str
    prefix: str
    schema: Mapping[str, Any]
    suffix: str


@dataclass(frozen=True)
class CallGrammar:
    """The form of an output that must be calls.

    It is `begin`, one of `calls`, any number of `separator` and one of `calls` if `parallel`, then
    `end`. `special` names texts in it that may be special tokens. If the tokenizer has such a
    token, the text means that token, not its characters.
    """

    begin: str
    calls: tuple[CallShape, ...]
    separator: str
    end: str
    parallel: bool
    special: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReasoningFormat:
    """How reasoning is delimited.

    `start` and `end` are the markers; some families have others with the same meaning. `closing`
    ends the reasoning gracefully when a budget is spent: generation continues with the answer.
    `answer_prefix` is what the model writes between `end` and the answer, beyond white space
    (harmony's message header).
    """

    start: str
    end: str
    closing: str
    answer_prefix: str = ""
    other_starts: tuple[str, ...] = ()
    other_ends: tuple[str, ...] = ()

    @property
    def starts(self) -> tuple[str, ...]:
        return (self.start, *self.other_starts)

    @property
    def ends(self) -> tuple[str, ...]:
        return (self.end, *self.other_ends)
