"""Decides in a confined process whether a grammar is safe to compile in the engine.

Compiling runs native code that cannot be interrupted. A confined process can be killed: a hostile
grammar gets its client an error and does not harm the engine. The engine compiles only grammars
that pass this trial.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec
import numpy as np

from penstock.protocol.errors import InputError
from penstock.protocol.structured import FIELD, StructuredOutputsParams
from penstock.structured.backend import Bits, GrammarBackend, make_backend
from penstock.structured.schemas import read_schema
from penstock.structured.tags import tool_schemas
from penstock.structured.vocabulary import Vocabulary

ENTRY = "penstock.structured.trial:make_trial"


class Setup(msgspec.Struct, frozen=True):
    """What the process needs to try grammars."""

    backend: str
    vocabulary: Vocabulary


class Passed(msgspec.Struct, tag=True):
    lowered: str  # what `GrammarBackend.compile` takes


class Refused(msgspec.Struct, tag=True):
    error: str
    field: str = FIELD


Verdict = Passed | Refused
TOO_DEEP = (InputError, RecursionError)
read_verdict = msgspec.msgpack.Decoder(Verdict).decode
_read_params = msgspec.msgpack.Decoder(StructuredOutputsParams).decode


def make_trial(setup: bytes) -> Callable[[bytes], bytes]:
    """The entry point of a confined process. Returns a function from params to a verdict."""
    given = msgspec.msgpack.decode(setup, type=Setup)
    backend = make_backend(given.backend, given.vocabulary)
    bits = np.zeros((1, -(-len(given.vocabulary) // 32)), dtype=np.int32)
    return lambda params: msgspec.msgpack.encode(try_out(backend, _read_params(params), bits))


def try_out(backend: GrammarBackend, params: StructuredOutputsParams, bits: Bits) -> Verdict:
    """Compile a grammar and fill its first mask into `bits`."""
    try:
        lowered = backend.lower(params)
        matcher = backend.compile(lowered).matcher()
        backend.fill([matcher], bits)
        if matcher.error is not None:
            raise InputError(f"{FIELD} cannot be used: {matcher.error}", FIELD)
        if not bits.any():
            raise InputError(f"{FIELD} cannot be used: no text matches it", FIELD)
        return Passed(lowered)
    except TOO_DEEP as error:
        refused = Refused(str(error) or f"{FIELD} is too complex: {type(error).__name__}")
    with contextlib.suppress(*TOO_DEEP):  # a refused tag may be malformed
        return _blame_tool(backend, params, bits) or refused
    return refused


def _blame_tool(
    backend: GrammarBackend, params: StructuredOutputsParams, bits: Bits
) -> Refused | None:
    """Return the refusal of a single tool's schema, if a tool is the cause."""
    if params.kind != "structural_tag":
        return None
    tag = read_schema(params.structural_tag, f"{FIELD}.structural_tag")
    for name, schema in tool_schemas(tag.get("format") if isinstance(tag, dict) else None):
        alone = StructuredOutputsParams(json=schema, lenient=True)
        found = try_out(backend, alone, bits)
        if isinstance(found, Refused):
            what = f"the parameters of the tool {name!r}"
            why = found.error.replace(f"{FIELD}.json", what).replace(FIELD, what)
            return Refused(why, "tools")
    return None
