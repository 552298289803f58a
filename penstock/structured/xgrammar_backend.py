"""XGrammarBackend: the alternative backend, xgrammar. An optional package that imports torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import xgrammar

from penstock.protocol.errors import InputError
from penstock.protocol.structured import FIELD, StructuredOutputsParams
from penstock.structured.backend import Bits, Grammar, Matcher
from penstock.structured.closed_objects import close_objects
from penstock.structured.schemas import read_schema
from penstock.structured.tags import TOOL, modern_form
from penstock.structured.vocabulary import Vocabulary

MAX_WHITESPACE = 20
MAX_ERROR_LENGTH = 500


class XGrammarBackend:
    def __init__(self, vocabulary: Vocabulary, num_threads: int = 1) -> None:
        if not vocabulary.end_ids:
            raise InputError(f"{FIELD} needs a model that has an end-of-text token", FIELD)
        # Special tokens get a byte that is invalid in UTF-8, so that no text can spell them.
        special = frozenset(vocabulary.special_ids)
        self._info = xgrammar.TokenizerInfo(
            [
                b"\xff" + token if i in special else token
                for i, token in enumerate(vocabulary.tokens)
            ],
            vocab_size=len(vocabulary),
            stop_token_ids=vocabulary.end_ids,
        )
        self._special = {vocabulary.tokens[i].decode(): i for i in vocabulary.special_ids}
        self._end_ids = vocabulary.end_ids
        self._vocab_size = len(vocabulary)
        # `GrammarCompiler` of this package caches compiled grammars.
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=num_threads)

    def lower(self, params: StructuredOutputsParams) -> str:
        if params.whitespace_pattern is not None:
            raise InputError(
                f"{FIELD}.whitespace_pattern is not known to xgrammar: leave it out, or start the "
                "engine with structured_outputs_backend=llguidance",
                FIELD,
            )
        text: Any
        match params.kind:
            case "json":
                schema = read_schema(params.json, f"{FIELD}.json")
                if params.disable_additional_properties:
                    close_objects(schema)
                text = json.dumps(schema)
            case "json_object":
                text = '{"type": "object"}'
            case "choice":
                assert params.choice is not None
                quoted = (_quote(choice) for choice in params.choice)
                text = f"root ::= {' | '.join(quoted)}"
            case "structural_tag":
                tag = read_schema(params.structural_tag, f"{FIELD}.structural_tag")
                closes = params.disable_additional_properties
                text = json.dumps(self._in_its_words(modern_form(tag), closes))
            case kind:
                text = getattr(params, kind)
        return json.dumps([params.kind, text, params.disable_any_whitespace])

    def _in_its_words(self, tag: Any, closes: bool) -> Any:
        """Convert a structural tag for xgrammar.

        Special tokens become ids, because the library does not know their names. Names of tools are
        removed. With `closes`, objects of schemas are closed.
        """
        if isinstance(tag, list):
            return [self._in_its_words(item, closes) for item in tag]
        if not isinstance(tag, dict):
            return tag
        if tag.get("type") == "json_schema":
            if closes:
                close_objects(tag.get("json_schema"))
            return {key: value for key, value in tag.items() if key != TOOL}
        if tag.get("type") == "token" and tag.get("token") in self._special:
            return {"type": "token", "token": self._special[tag["token"]]}
        return {key: self._in_its_words(value, closes) for key, value in tag.items()}

    def compile(self, lowered: str) -> Grammar:
        kind, text, no_whitespace = json.loads(lowered)
        try:
            return XGrammar(
                self._compile(kind, text, no_whitespace), self._end_ids, self._vocab_size
            )
        except (RuntimeError, ValueError, TypeError) as error:
            why = " ".join(str(error).split())
            raise InputError(f"{FIELD} cannot be used: {why[-MAX_ERROR_LENGTH:]}", FIELD) from error

    def _compile(self, kind: str, text: str, no_whitespace: bool) -> xgrammar.CompiledGrammar:
        match kind:
            case "json" | "json_object":
                # Strict mode would forbid what the schema leaves open.
                return self._compiler.compile_json_schema(
                    text,
                    any_whitespace=not no_whitespace,
                    separators=(",", ":") if no_whitespace else None,
                    max_whitespace_cnt=None if no_whitespace else MAX_WHITESPACE,
                    strict_mode=False,
                )
            case "regex":
                return self._compiler.compile_regex(text)
            case "structural_tag":
                return self._compiler.compile_structural_tag(text)
            case "grammar" if "::=" not in text:
                return self._compiler.compile_lark(text)
            case _:
                return self._compiler.compile_grammar(text)

    def fill(self, matchers: Sequence[Matcher], bits: Bits) -> None:
        native = [matcher.native for matcher in matchers if isinstance(matcher, XGrammarMatcher)]
        self._batch.batch_fill_next_token_bitmask(native, bits, list(range(len(native))))


class XGrammar:
    def __init__(
        self, compiled: xgrammar.CompiledGrammar, end_ids: list[int], vocab_size: int
    ) -> None:
        self._compiled = compiled
        self._end_ids = frozenset(end_ids)
        self._vocab_size = vocab_size

    def matcher(self) -> XGrammarMatcher:
        native = xgrammar.GrammarMatcher(self._compiled)
        return XGrammarMatcher(native, self._end_ids, self._vocab_size)


class XGrammarMatcher:
    error: str | None = None  # the library has no limits that a matcher could reach

    def __init__(
        self, native: xgrammar.GrammarMatcher, end_ids: frozenset[int], vocab_size: int
    ) -> None:
        self.native = native
        self._end_ids = end_ids
        self._vocab_size = vocab_size

    @property
    def is_complete(self) -> bool:
        if self.native.is_terminated():
            return True
        return self.native.is_completed() and self._only_end_may_follow()

    def _only_end_may_follow(self) -> bool:
        bits = np.zeros((1, -(-self._vocab_size // 32)), dtype=np.int32)
        self.native.fill_next_token_bitmask(bits)
        flags = np.unpackbits(bits.view(np.uint8), count=self._vocab_size, bitorder="little")
        return self._end_ids.issuperset(np.flatnonzero(flags).tolist())

    def accept(self, token_id: int) -> bool:
        return bool(self.native.accept_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        self.native.rollback(num_tokens)


def _quote(text: str) -> str:
    """Quote a text as a terminal. The library's grammars use JSON's escapes."""
    return json.dumps(text, ensure_ascii=True)
