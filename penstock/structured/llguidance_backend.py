"""GuidanceBackend: the default backend, llguidance. Compiles in milliseconds, masks in ~10 us."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from penstock.protocol.errors import InputError
from penstock.protocol.structured import FIELD, StructuredOutputsParams
from penstock.structured.backend import Bits, Grammar, Matcher, Tokenize
from penstock.structured.closed_objects import close_objects
from penstock.structured.schemas import read_schema
from penstock.structured.tags import tag_to_lark
from penstock.structured.vocabulary import Vocabulary

# Enough for indentation, too little for a model to loop in.
WHITESPACE = r"[ \n\r\t]{0,20}"
MAX_ERROR_LENGTH = 500
# Below the library's defaults, with which one request takes hundreds of MB and a step seconds.
LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 25_000,  # of one or two kB each
    "max_grammar_size": 200_000,
}


class GuidanceBackend:
    def __init__(
        self, vocabulary: Vocabulary, tokenize: Tokenize | None = None, num_threads: int = 1
    ) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = _make_tokenizer(vocabulary, tokenize)
        self._limits = LLParserLimits(verbose_errors=False, **LIMITS)  # type: ignore[arg-type]
        self._executor = LLExecutor(num_threads)

    def lower(self, params: StructuredOutputsParams) -> str:
        try:
            return self._lower(params)
        except InputError:
            raise
        except Exception as error:  # the library's converters raise any type
            raise InputError(_explain(str(error)), FIELD) from error

    def _lower(self, params: StructuredOutputsParams) -> str:
        match params.kind:
            case "json":
                schema = read_schema(params.json, f"{FIELD}.json")
                return LLMatcher.grammar_from_json_schema(
                    self._prepare_schema(schema, params), overrides=_json_options(params)
                )
            case "json_object":
                return LLMatcher.grammar_from_json_schema(
                    {"type": "object"}, overrides=_json_options(params)
                )
            case "regex":
                assert params.regex is not None
                return LLMatcher.grammar_from_regex(params.regex)
            case "choice":
                assert params.choice is not None
                texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice)
                # One terminal: a rule with this many alternatives would exceed a parser row.
                return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
            case "grammar":
                assert params.grammar is not None
                text = params.grammar
                return LLMatcher.grammar_from_lark(gbnf_to_lark(text) if "::=" in text else text)
            case _:
                return LLMatcher.grammar_from_lark(
                    tag_to_lark(
                        read_schema(params.structural_tag, f"{FIELD}.structural_tag"),
                        self._vocabulary,
                        lambda schema, is_tool: {
                            **self._prepare_schema(schema, params),
                            "x-guidance": _json_options(params, is_tool),
                        },
                    )
                )

    def _prepare_schema(self, schema: Any, params: StructuredOutputsParams) -> dict[str, Any]:
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        if params.disable_additional_properties:
            close_objects(schema)
        # Drop the client's options: they could override ours.
        return {key: value for key, value in schema.items() if key != "x-guidance"}

    def compile(self, lowered: str) -> Grammar:
        return GuidanceGrammar(lambda: self._make(lowered))

    def _make(self, lowered: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, lowered, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise InputError(_explain(matcher.get_error()), FIELD)
        return matcher

    def fill(self, matchers: Sequence[Matcher], bits: Bits) -> None:
        assert bits.flags.c_contiguous
        numbered = [
            (matcher.native, row)
            for row, matcher in enumerate(matchers)
            if isinstance(matcher, GuidanceMatcher)
        ]
        row_bytes = bits.shape[1] * bits.itemsize
        self._executor.unsafe_compute_mask_ptr(numbered, bits.ctypes.data, row_bytes, len(bits))


class GuidanceGrammar:
    """Builds every matcher from scratch.

    Copies of a matcher share an automaton. It grows with each output until it reaches its limit for
    all of them.
    """

    def __init__(self, make: Callable[[], LLMatcher]) -> None:
        self._make = make
        self._first = [make()]  # for the first caller

    def matcher(self) -> GuidanceMatcher:
        try:
            return GuidanceMatcher(self._first.pop())
        except IndexError:
            return GuidanceMatcher(self._make())


class GuidanceMatcher:
    def __init__(self, native: LLMatcher) -> None:
        self.native = native

    @property
    def error(self) -> str | None:
        return _plain(self.native.get_error()) if self.native.is_error() else None

    @property
    def is_complete(self) -> bool:
        return self.native.is_stopped()

    def accept(self, token_id: int) -> bool:
        return self.native.try_consume_tokens([token_id]) == 1

    def rollback(self, num_tokens: int) -> None:
        self.native.rollback(num_tokens)


class _Spelling:
    """The tokenizer interface that the library expects."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, tokenize: Tokenize | None) -> None:
        special = frozenset(vocabulary.special_ids)
        # Special tokens get a byte that is invalid in UTF-8, so that no text can spell them.
        self.tokens = [
            b"\xff" + token if token_id in special else token
            for token_id, token in enumerate(vocabulary.tokens)
        ]
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.end_ids[0]
        self.tokenize = tokenize

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("only texts are tokenized")  # the library probes whether bytes work
        return self.tokenize(text) if self.tokenize is not None else []


def _make_tokenizer(vocabulary: Vocabulary, tokenize: Tokenize | None) -> LLTokenizer:
    if not vocabulary.end_ids:
        raise InputError(f"{FIELD} needs a model that has an end-of-text token", FIELD)
    spelling = _Spelling(vocabulary, tokenize)
    tokenizer = LLTokenizer(
        TokenizerWrapper(spelling), n_vocab=len(vocabulary), eos_token=vocabulary.end_ids
    )
    if tokenize is None:
        spelling.tokenize = tokenizer.greedy_tokenize
    return tokenizer


def _json_options(params: StructuredOutputsParams, is_tool: bool = False) -> Any:
    pattern = params.whitespace_pattern or WHITESPACE
    lenient = params.lenient or is_tool
    return {
        "whitespace_flexible": not params.disable_any_whitespace,
        "whitespace_pattern": None if params.disable_any_whitespace else pattern,
        "lenient": lenient,
        "coerce_one_of": lenient,
    }


def _explain(error: str) -> str:
    return f"{FIELD} cannot be used: {_plain(error)}"


def _plain(error: str) -> str:
    """The library's error message on one line, without its placeholders."""
    if error.startswith("NoExtension"):
        return "no text matches it"
    lines = [line for line in error.splitlines() if "<non-verbose/>" not in line]
    return " ".join(" ".join(lines).split())[:MAX_ERROR_LENGTH]
