"""Computes a lower bound on a text's tokens from its length alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from penstock.text.detokenizer import byte_level_alphabet

if TYPE_CHECKING:
    import tokenizers

MOST_COMPOSED = 4  # characters that NFC may combine into one


def most_characters(backend: tokenizers.Tokenizer, byte_level: bool) -> int | None:
    """The most characters of one token; None if unbounded, or if characters may be dropped.

    `byte_level`: tokens are spelled in GPT-2's alphabet, else as in SentencePiece.
    """
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None  # such a token takes all adjacent blanks
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if byte_level:
        names = list(byte_level_alphabet())
    elif getattr(backend.model, "byte_fallback", False):
        names = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        return None
    if not all(name in vocabulary for name in names):
        return None  # unknown characters are dropped
    normalizers, splits = _steps(backend.normalizer), _steps(backend.pre_tokenizer)
    if not all(_keeps_length(step) for step in normalizers):
        return None
    if not all(_keeps_everything(step) for step in splits):
        return None
    composes = any(step["type"] == "NFC" for step in normalizers)
    return max(map(len, vocabulary)) * (MOST_COMPOSED if composes else 1)


def _steps(component: Any) -> list[dict[str, Any]]:
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    return list(state.get("normalizers") or state.get("pretokenizers") or [state])


def _keeps_length(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        return bool(step["pattern"] == {"String": " "} and len(step["content"]) == 1)
    return step["type"] in ("NFC", "Prepend")


def _keeps_everything(step: dict[str, Any]) -> bool:
    if step["type"] == "Split":
        return bool(step["behavior"] != "Removed")
    return step["type"] in ("ByteLevel", "Digits", "Metaspace")
