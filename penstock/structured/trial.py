"""What a confined process does with a grammar: try it out.

Compiling is native code that cannot be interrupted. In a process that may be killed, whatever a
client thought of costs it an error, and the engine nothing; what has passed here is then compiled
in the engine.
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
    """What a process needs to try grammars out."""

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
    """The entry of a confined process: params in, a verdict out."""
    given = msgspec.msgpack.decode(setup, type=Setup)
    backend = make_backend(given.backend, given.vocabulary)
    bits = np.zeros((1, -(-len(given.vocabulary) // 32)), dtype=np.int32)
    return lambda params: msgspec.msgpack.encode(try_out(backend, _read_params(params), bits))


def try_out(backend: GrammarBackend, params: StructuredOutputsParams, bits: Bits) -> Verdict:
    """Compile it and fill its first mask into `bits`."""
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
    with contextlib.suppress(*TOO_DEEP):  # what is refused need not be well-formed
        return _blame_tool(backend, params, bits) or refused
    return refused


def _blame_tool(
    backend: GrammarBackend, params: StructuredOutputsParams, bits: Bits
) -> Refused | None:
    """Why the schema of one of the tools is refused, where what is refused holds tools."""
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
