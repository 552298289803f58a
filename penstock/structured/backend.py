"""What a grammar engine must offer, and which ones there are."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.protocol.errors import ConfigError
from penstock.protocol.structured import StructuredOutputsParams
from penstock.structured.vocabulary import Vocabulary

Tokenize = Callable[[str], list[int]]
Bits = NDArray[np.int32]  # [rows, ceil(vocab_size / 32)]; bit i % 32 of word i // 32 is token i


class Matcher(Protocol):
    """Where one output stands in its grammar."""

    @property
    def error(self) -> str | None:
        """Why this matcher can go on no more (a limit was reached), if so."""

    @property
    def is_complete(self) -> bool:
        """Whether the output is finished: nothing may follow, or the end token has been taken."""

    def accept(self, token_id: int) -> bool:
        """Take the next token; False, and nothing changes, if the grammar has no place for it."""

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens."""


class Grammar(Protocol):
    """A compiled grammar, for several threads."""

    def matcher(self) -> Matcher:
        """One for a new output, independent of others. This may take as long as compiling."""


class GrammarBackend(Protocol):
    """Compiles grammars for one vocabulary. May be called from several threads."""

    def lower(self, params: StructuredOutputsParams) -> str:
        """What `compile` takes. Raises `InputError` for what it cannot be made from.

        The work that Python does is done here; `compile` does not hold the interpreter's lock.
        """

    def compile(self, lowered: str) -> Grammar:
        """Raises `InputError` for what is wrong or too large."""

    def fill(self, matchers: Sequence[Matcher], bits: Bits) -> None:
        """Write which tokens may come next into row i of `bits` for the i-th matcher.

        A matcher that fails has an `error` afterwards; its row may hold anything. Does not hold
        the interpreter's lock.
        """


def make_backend(
    name: str,
    vocabulary: Vocabulary,
    tokenize: Tokenize | None = None,
    num_threads: int = 1,
) -> GrammarBackend:
    """Takes a part of a second for a large vocabulary.

    `tokenize` is the model's own way to write a text, where a backend wants to know it for text
    that has to come; `num_threads` fill masks of one batch.
    """
    if name == "llguidance":
        from penstock.structured.llguidance_backend import GuidanceBackend

        return GuidanceBackend(vocabulary, tokenize, num_threads)
    assert name == "xgrammar", f"unknown backend {name}"
    check_backend(name)
    from penstock.structured.xgrammar_backend import XGrammarBackend

    return XGrammarBackend(vocabulary, num_threads)


def check_backend(name: str) -> None:
    """Raise `ConfigError` if the backend's package is not there. Imports nothing of it."""
    if importlib.util.find_spec(name) is None:
        raise ConfigError(
            f"structured_outputs_backend={name} needs a package: "
            f"pip install {'penstock[xgrammar]' if name == 'xgrammar' else name}"
        )
