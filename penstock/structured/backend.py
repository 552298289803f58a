"""GrammarBackend: the interface of a grammar library, and the choice between the two backends."""

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
    """The position of one output in its grammar."""

    @property
    def error(self) -> str | None:
        """Why this matcher cannot continue (it reached a limit), or None."""

    @property
    def is_complete(self) -> bool:
        """Whether the output is complete: no token may follow, or the end token was accepted."""

    def accept(self, token_id: int) -> bool:
        """Accept the next token. Returns False and changes nothing if the grammar forbids it."""

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` tokens."""


class Grammar(Protocol):
    """A compiled grammar. Thread-safe."""

    def matcher(self) -> Matcher:
        """Make an independent matcher for a new output. This may take as long as compiling."""


class GrammarBackend(Protocol):
    """Compiles grammars for one vocabulary. Thread-safe."""

    def lower(self, params: StructuredOutputsParams) -> str:
        """Convert `params` into the input of `compile`. Raises `InputError` if that is impossible.

        All work in Python happens here. `compile` does not hold the GIL.
        """

    def compile(self, lowered: str) -> Grammar:
        """Compile a grammar. Raises `InputError` if it is invalid or too large."""

    def fill(self, matchers: Sequence[Matcher], bits: Bits) -> None:
        """Write the allowed next tokens of the i-th matcher into row i of `bits`.

        A matcher that fails has an `error` afterwards, and its row is undefined. Does not hold the
        GIL.
        """


def make_backend(
    name: str,
    vocabulary: Vocabulary,
    tokenize: Tokenize | None = None,
    num_threads: int = 1,
) -> GrammarBackend:
    """Build a backend. Takes a fraction of a second for a large vocabulary.

    `tokenize` is the model's tokenizer. A backend may use it for text that the grammar forces.
    `num_threads` threads fill the masks of one batch.
    """
    if name == "llguidance":
        from penstock.structured.llguidance_backend import GuidanceBackend

        return GuidanceBackend(vocabulary, tokenize, num_threads)
    assert name == "xgrammar", f"unknown backend {name}"
    check_backend(name)
    from penstock.structured.xgrammar_backend import XGrammarBackend

    return XGrammarBackend(vocabulary, num_threads)


def check_backend(name: str) -> None:
    """Raise `ConfigError` if the backend's package is not installed. Does not import it."""
    if importlib.util.find_spec(name) is None:
        raise ConfigError(
            f"structured_outputs_backend={name} needs a package: "
            f"pip install {'penstock[xgrammar]' if name == 'xgrammar' else name}"
        )
