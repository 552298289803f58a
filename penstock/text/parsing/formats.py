"""How a model family writes calls and reasoning: what others need to know of it beforehand.

The renderer and the grammar compiler use these; the parsers themselves read the output.
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
    """The call of the tool `name` as text: `prefix`, then JSON that satisfies `schema`, then
    `suffix`."""

    name: str
    prefix: str
    schema: Mapping[str, Any]
    suffix: str


@dataclass(frozen=True)
class CallGrammar:
    """What an output that must be calls looks like: `begin`, one of `calls`, then, if `parallel`,
    any number of `separator` and one of `calls` again, then `end`.

    `special` names the tokens within these texts that may be special ones: where the tokenizer
    has such a token, the text stands for that token and not for its characters.
    """

    begin: str
    calls: tuple[CallShape, ...]
    separator: str
    end: str
    parallel: bool
    special: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReasoningFormat:
    """How reasoning is framed.

    `start` and `end` are the markers; some families have others that mean the same. `closing` ends
    the reasoning gracefully where a budget is spent: generation goes on after it with the answer.
    `answer_prefix` is what the model writes between `end` and the answer itself, beyond white space
    (harmony's header of a message).
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
