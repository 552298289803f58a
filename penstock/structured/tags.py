"""Structural tags: free text with tagged parts that must match a format.

The formats are xgrammar's. This module converts them to a Lark grammar for llguidance. It also
builds them for the tool calls of a model family.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from penstock.protocol.errors import InputError
from penstock.protocol.structured import FIELD, StructuredOutputsParams
from penstock.structured.vocabulary import Vocabulary
from penstock.text.parsing.formats import CallGrammar, CallShape

Schema = dict[str, Any]
Prepare = Callable[[Any, bool], Mapping[str, Any]]
NAME = f"{FIELD}.structural_tag"
TOOL = "tool"  # key in a json_schema format: the tool whose arguments it describes
TEXT_RULE = r"TEXT: /(.|\n)*/"


def call_structure(grammar: CallGrammar, is_special: Callable[[str], bool]) -> Schema:
    """Return the structural tag that outputs of `grammar` match.

    `is_special` tells whether the vocabulary has a special token of that name. Texts in
    `grammar.special` are written as special tokens if so.
    """
    names = [name for name in grammar.special if is_special(name)]

    def text(value: str) -> list[Schema]:
        return [
            {"type": "token", "token": piece}
            if piece in names
            else {"type": "const_string", "value": piece}
            for piece in _split(value, names)
        ]

    def call(shape: CallShape) -> Schema:
        # Tools come with arbitrary schemas: where TOOL is set, unknown keywords are ignored.
        body = {
            "type": "json_schema",
            "json_schema": dict(shape.schema),
            TOOL: shape.name,
        }
        return _sequence([*text(shape.prefix), body, *text(shape.suffix)])

    calls = [call(shape) for shape in grammar.calls]
    one = calls[0] if len(calls) == 1 else {"type": "or", "elements": calls}
    elements = [*text(grammar.begin), one]
    if grammar.parallel:
        more = _sequence([*text(grammar.separator), one])
        elements.append({"type": "star", "content": more})
    elements += text(grammar.end)
    return {"type": "structural_tag", "format": _sequence(elements)}


def params_for_calls(
    grammar: CallGrammar, is_special: Callable[[str], bool]
) -> StructuredOutputsParams:
    """Return the params that restrict an output to calls of `grammar`."""
    tag = call_structure(grammar, is_special)
    return StructuredOutputsParams(structural_tag=tag, field="tools")


def tool_schemas(form: Any) -> Iterator[tuple[str, Any]]:
    """Yield each tool in a format of `call_structure`: its name and the schema of its arguments."""
    if not isinstance(form, dict):
        return
    if form.get("type") == "json_schema" and TOOL in form:
        yield str(form[TOOL]), form.get("json_schema")
    elements = form.get("elements")
    for part in (*(elements if isinstance(elements, list) else ()), form.get("content")):
        yield from tool_schemas(part)


def _sequence(elements: Sequence[Schema]) -> Schema:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": list(elements)}


def _split(value: str, names: Sequence[str]) -> list[str]:
    """Split a text into special tokens and the text between them."""
    if not names:
        return [value] if value else []
    pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return [piece for piece in re.split(f"({pattern})", value) if piece]


def modern_form(tag: Any) -> Schema:
    """Convert a structural tag to the current form, which has `format`."""
    if not isinstance(tag, dict) or tag.get("type") != "structural_tag":
        raise InputError(f'{NAME} must be an object with "type": "structural_tag"', FIELD)
    if "format" in tag:
        return tag
    tags = [
        {
            "type": "tag",
            "begin": _get(item, "begin", str),
            "content": {"type": "json_schema", "json_schema": item.get("schema", {})},
            "end": _get(item, "end", str),
        }
        for item in _get(tag, "structures", list)
    ]
    triggers = _get(tag, "triggers", list)
    form = {"type": "triggered_tags", "triggers": triggers, "tags": tags}
    return {"type": "structural_tag", "format": form}


def tag_to_lark(tag: Any, vocabulary: Vocabulary, prepare: Prepare) -> str:
    """Convert a structural tag, in the current or the older form, to a Lark grammar.

    `prepare` is applied to every schema. Its second argument tells whether the schema is a tool's.
    """
    writer = _Writer(vocabulary, prepare)
    start = writer.write(modern_form(tag)["format"])
    rules = [f"start: {start}", *writer.rules]
    if any(re.search(r"\bTEXT\b", rule) for rule in rules):
        rules.append(TEXT_RULE)
    return "\n".join(rules)


class _Writer:
    def __init__(self, vocabulary: Vocabulary, prepare: Prepare) -> None:
        self.rules: list[str] = []
        self._prepare = prepare
        self._special = {vocabulary.tokens[i].decode(): i for i in vocabulary.special_ids}
        self._vocab_size = len(vocabulary)

    def write(self, form: Any) -> str:
        """Convert a format to an expression that is valid in any position."""
        kind = _get(form, "type", str)
        method = getattr(self, f"_{kind}", None) if f"_{kind}" in FORMATS else None
        if method is None:
            known = sorted(name[1:] for name in FORMATS)
            raise InputError(
                f"{NAME}: there is no format {kind!r:.80} here; there are {', '.join(known)}", FIELD
            )
        expression: str = method(form)
        return expression

    def _rule(self, body: str, prefix: str = "r", attributes: str = "") -> str:
        name = f"{prefix}{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def _const_string(self, form: Schema) -> str:
        return _quote(_get(form, "value", str))

    def _token(self, form: Schema) -> str:
        token = form.get("token")
        token_id = self._special.get(token) if isinstance(token, str) else token
        is_id = isinstance(token_id, int) and not isinstance(token_id, bool)
        if not is_id or not 0 <= token_id < self._vocab_size:  # type: ignore[operator]
            raise InputError(f"{NAME}: there is no special token {token!r:.80}", FIELD)
        return f"<[{token_id}]>"

    def _json_schema(self, form: Schema) -> str:
        schema = self._prepare(form.get("json_schema", {}), TOOL in form)
        return self._rule(f"%json {json.dumps(schema)}")

    def _regex(self, form: Schema) -> str:
        return self._rule(f"/{_slashed(_get(form, 'pattern', str))}/", "R")

    def _any_text(self, form: Schema) -> str:
        return "TEXT"

    def _sequence(self, form: Schema) -> str:
        parts = [self.write(item) for item in _get(form, "elements", list)]
        return self._rule(" ".join(parts) or '""')

    def _or(self, form: Schema) -> str:
        parts = [self.write(item) for item in _get(form, "elements", list)]
        return self._rule(" | ".join(parts) or '""')

    def _optional(self, form: Schema) -> str:
        return self._rule(f"({self.write(form.get('content'))})?")

    def _star(self, form: Schema) -> str:
        return self._rule(f"({self.write(form.get('content'))})*")

    def _plus(self, form: Schema) -> str:
        return self._rule(f"({self.write(form.get('content'))})+")

    def _tag(self, form: Schema, begun: str = "") -> str:
        """Convert a tag. `begun` is the part of `begin` that was already written."""
        begin = _get(form, "begin", str)
        content, ends = form.get("content"), form.get("end")
        ends = ends if isinstance(ends, list) else [ends]
        if not all(isinstance(end, str) for end in ends):
            raise InputError(f"{NAME}: end must be a text, or texts, got {ends!r:.80}", FIELD)
        start = _quote(begin[len(begun) :])
        if isinstance(content, dict) and content.get("type") == "any_text" and all(ends):
            # Text up to the first end: a lazy lexeme.
            closing = " | ".join(_quote(end) for end in ends)
            return self._rule(f"{start} {self._lazy(f'({closing})')}")
        closing = " | ".join(_quote(end) for end in ends)
        return self._rule(f"{start} {self.write(content)} ({closing})")

    def _tags_with_separator(self, form: Schema) -> str:
        tags = " | ".join(self._tag(tag) for tag in _get(form, "tags", list))
        one = self._rule(tags or '""')
        body = one
        if not form.get("stop_after_first"):
            body += f" ({_quote(_get(form, 'separator', str))} {one})*"
        many = self._rule(body)
        return many if form.get("at_least_one") else self._rule(f"({many})?")

    def _triggered_tags(self, form: Schema) -> str:
        """Free text in which a trigger must continue as one of the tags that start with it."""
        tags, triggers = _get(form, "tags", list), _get(form, "triggers", list)
        begun = []
        for trigger in triggers:
            if not isinstance(trigger, str) or not trigger:
                raise InputError(f"{NAME}: triggers must be texts, got {trigger!r:.80}", FIELD)
            own = [tag for tag in tags if _get(tag, "begin", str).startswith(trigger)]
            rest = " | ".join(self._tag(tag, begun=trigger) for tag in own)
            if rest:
                begun.append(self._rule(f"{self._lazy(_quote(trigger))} ({rest})"))
        covered = [tag for tag in tags if any(tag["begin"].startswith(t) for t in triggers)]
        if len(covered) < len(tags):
            raise InputError(f"{NAME}: every tag must begin with one of the triggers", FIELD)
        one = self._rule(" | ".join(begun) or '""')
        if form.get("stop_after_first"):
            return one if form.get("at_least_one") else self._rule(f"{one} | TEXT")
        return self._rule(f"{one}{'+' if form.get('at_least_one') else '*'} TEXT")

    def _lazy(self, ending: str) -> str:
        """A lexeme: any text up to and including the first `ending`."""
        return self._rule(f"TEXT {ending}", "lexeme_", "[lazy]")


FORMATS = (
    "_any_text", "_const_string", "_json_schema", "_optional", "_or", "_plus", "_regex",
    "_sequence", "_star", "_tag", "_tags_with_separator", "_token", "_triggered_tags",
)  # fmt: skip


def _get(form: Any, name: str, kind: type) -> Any:
    value = form.get(name) if isinstance(form, dict) else None
    if not isinstance(value, kind):
        what = "a list" if kind is list else "a text"
        raise InputError(f"{NAME}: {name} must be {what} in {form!r:.120}", FIELD)
    return value


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _slashed(pattern: str) -> str:
    """Escape a regular expression for use between slashes."""
    return re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", pattern, flags=re.DOTALL)
