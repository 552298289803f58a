"""StructuredOutputsParams: what an output must look like, checked for form on construction."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from penstock.protocol.errors import InputError

FIELD = "structured_outputs"
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
# No request of good faith comes near these. What is smaller and still too much work is found out
# when it is compiled, under limits of time and memory.
MAX_SPEC_LENGTH = 512 * 1024  # characters of a schema, an expression, a grammar or all choices
MAX_CHOICES = 10_000
MAX_MARKER_LENGTH = 1024


class StructuredOutputsParams(msgspec.Struct, kw_only=True, omit_defaults=True, eq=True):
    """What the output must match: exactly one of the first six."""

    json: Any = None
    """A JSON schema: a dict, or JSON text (which is what is kept)."""
    regex: str | None = None
    """A regular expression that all of the output matches."""
    choice: list[str] | None = None
    """Texts of which the output is one."""
    grammar: str | None = None
    """A context-free grammar: Lark (rules are `name: ...`) or EBNF (`name ::= ...`)."""
    json_object: bool | None = None
    """Any JSON object."""
    structural_tag: Any = None
    """Tags within text, and what they hold: a dict, or JSON text (which is what is kept)."""

    disable_any_whitespace: bool = False
    """JSON without white space."""
    disable_additional_properties: bool = True
    """JSON objects have no properties but those that their schema names, unless it says otherwise
    with `additionalProperties`. Off: they may have others wherever JSON schema allows it."""
    whitespace_pattern: str | None = None
    """A regular expression of the white space that may stand between parts of JSON."""
    lenient: bool = False
    """Ignore what the backend does not know of a schema, rather than refuse the request."""
    reasoning_end: str | list[str] | None = None
    """Leave the output free until this text, or one of these, has appeared in it; what follows must
    match."""
    reasoning_start: str | None = None
    """What reasoning begins with. If the vocabulary has a token of this name, the output may do
    without reasoning: it is free if it begins with this token, and else must match at once. If not,
    the output must begin with this text. Counts with `reasoning_end`."""

    field: str = FIELD
    """What errors call it: the field that the client filled in."""

    def __post_init__(self) -> None:
        for name in ("json", "structural_tag"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                setattr(self, name, _to_json(name, value))
        self.validate()

    @property
    def kind(self) -> str:
        """Which of the first six fields is set."""
        return next(name for name in KINDS if _is_set(getattr(self, name)))

    @property
    def reasoning_ends(self) -> list[str]:
        """`reasoning_end` as a list, which is empty if the answer begins at once."""
        end = self.reasoning_end
        return [] if end is None else list(end) if isinstance(end, (list, tuple)) else [end]

    def validate(self) -> None:
        """Raise `InputError` for what can be seen to be wrong without compiling it."""
        given = [name for name in KINDS if _is_set(getattr(self, name))]
        if len(given) != 1:
            found = ", ".join(given) or "none"
            raise InputError(f"{FIELD} must contain exactly one of {', '.join(KINDS)}, got {found}",
                             FIELD)  # fmt: skip
        for name in ("regex", "grammar", "whitespace_pattern", "reasoning_start"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise InputError(f"{FIELD}.{name} must be a text, got {value!r:.80}", FIELD)
        for name in ("disable_any_whitespace", "disable_additional_properties", "lenient"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(
                    f"{FIELD}.{name} must be True or False, got {getattr(self, name)!r:.80}", FIELD
                )
        if self.json_object not in (None, True, False):
            raise InputError(
                f"{FIELD}.json_object must be True, got {self.json_object!r:.80}", FIELD
            )
        self._validate_choice()
        self._validate_ends()
        self._validate_size()

    def _validate_choice(self) -> None:
        if self.choice is None:
            return
        is_list = isinstance(self.choice, (list, tuple)) and bool(self.choice)
        if not is_list or not all(isinstance(text, str) and text for text in self.choice):
            raise InputError(
                f"{FIELD}.choice must be a list of texts that are not empty, "
                f"got {self.choice!r:.80}",
                FIELD,
            )
        if len(self.choice) > MAX_CHOICES:
            raise InputError(
                f"{FIELD}.choice may contain at most {MAX_CHOICES} texts, got {len(self.choice)}",
                FIELD,
            )

    def _validate_ends(self) -> None:
        ends = self.reasoning_ends
        is_given = self.reasoning_end is not None
        if is_given and not (ends and all(isinstance(end, str) and end for end in ends)):
            raise InputError(
                f"{FIELD}.reasoning_end must be a text, or texts, got {self.reasoning_end!r:.80}",
                FIELD,
            )
        if (length := sum(map(len, ends))) > MAX_MARKER_LENGTH:
            raise InputError(
                f"{FIELD}.reasoning_end may be at most {MAX_MARKER_LENGTH} characters long, "
                f"got {length}",
                FIELD,
            )

    def _validate_size(self) -> None:
        texts = [self.json, self.regex, self.grammar, self.structural_tag, self.whitespace_pattern]
        texts += self.choice or []
        for text in (*texts, *self.reasoning_ends, self.reasoning_start):
            if text is not None:
                _check_unicode(self.field, text)
        length = sum(len(text) for text in texts if text is not None)
        if length > MAX_SPEC_LENGTH:
            name = f"{FIELD}.{self.kind}" if self.field == FIELD else self.field
            raise InputError(
                f"{name} may be at most {MAX_SPEC_LENGTH} characters long, got {length}", self.field
            )


def _is_set(value: object) -> bool:
    return value is not None and value is not False


def _to_json(name: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise InputError(f"{FIELD}.{name} is nested too deeply", FIELD) from None
    except (TypeError, ValueError) as error:
        raise InputError(f"{FIELD}.{name} must be JSON: {error}", FIELD) from error


def _check_unicode(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{field} has a lone surrogate at position {error.start} of a text, "
            "which is not a character",
            field,
        ) from None
