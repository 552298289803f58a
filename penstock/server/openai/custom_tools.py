"""Custom tools, whose input is plain text. The model sees functions with one argument.

OpenAI's chat completions and Responses both have them. A call's arguments, `{"input": "..."}`, are
converted back to the text while they stream.
"""

from __future__ import annotations

import json
import re
from typing import Literal

from pydantic import Field

from penstock.server.schema.base import Body, Text
from penstock.text.parsing.formats import Tool

ARGUMENT = "input"
_HEAD = re.compile(rf'\s*\{{\s*"{ARGUMENT}"\s*:\s*"')
# The part of a JSON string that can be decoded: no partial escape and no lone surrogate.
_STRING = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}'
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4})*"
)


class InputGrammar(Body):
    definition: Text
    syntax: Literal["lark", "regex"]


class InputFormat(Body):
    """As chat completions have it. Responses have the grammar's fields in the format itself."""

    type: Literal["text", "grammar"]
    grammar: InputGrammar | None = Field(None, description="Required for type grammar.")


def custom_tool(name: str, description: str | None, grammar: InputGrammar | None) -> Tool:
    """Convert a custom tool to a function.

    A regular expression is enforced in the call. A Lark grammar is only described to the model.
    """
    argument = {"type": "string"}
    about = [description] if description else []
    if grammar is not None and grammar.syntax == "regex":
        argument["pattern"] = f"^(?:{grammar.definition})$"
        about.append(f"Its input matches the regular expression {grammar.definition}")
    elif grammar is not None:
        about.append(f"Its input matches this grammar in Lark's notation:\n{grammar.definition}")
    parameters = {
        "type": "object",
        "properties": {ARGUMENT: argument},
        "required": [ARGUMENT],
        "additionalProperties": False,
    }
    return Tool(name, parameters, "\n\n".join(about))


def arguments_of(text: str) -> str:
    """The arguments of the function that stands for a custom tool."""
    return json.dumps({ARGUMENT: text}, ensure_ascii=False)


class InputReader:
    """Extracts the input of one call from its streamed arguments."""

    def __init__(self) -> None:
        self._pending = ""
        self._has_begun = False
        self._is_over = False

    def feed(self, arguments: str) -> str:
        """Add a piece of the arguments. Returns the new text that can be decoded."""
        self._pending += arguments
        if not self._has_begun:
            head = _HEAD.match(self._pending)
            if head is None:
                return ""
            self._pending = self._pending[head.end() :]
            self._has_begun = True
        if self._is_over:
            return ""
        string = _STRING.match(self._pending)
        assert string is not None
        self._pending = self._pending[string.end() :]
        self._is_over = self._pending.startswith('"')
        return _decode(string[0])

    def finish(self) -> str:
        """Return the rest when the call is complete. Malformed arguments become the input."""
        rest = "" if self._has_begun else self._pending
        return rest.encode(errors="replace").decode()


def input_of(arguments: str, is_complete: bool) -> str:
    reader = InputReader()
    return reader.feed(arguments) + (reader.finish() if is_complete else "")


def _decode(string: str) -> str:
    text = json.loads(f'"{string}"', strict=False)
    assert isinstance(text, str)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
