"""Finds the tokens that end an output. Files often name one and leave the others to their text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEYS = ("eos", "eot", "eom")  # end of text, of a turn, of a message with a tool call
# Found by their text, whatever a file says: the end-of-turn tokens of model families.
_TURN_ENDS = frozenset(
    {
        "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|end_of_turn|>",
        "<end_of_utterance>", "<|return|>", "<|call|>", "<|end|>",
    }
)  # fmt: skip
_HARMONY = frozenset({"<|return|>", "<|call|>"})


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """The ids of end tokens, with the end of text first if the file names it."""
    named = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in _KEYS]
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    ends = _TURN_ENDS.intersection(tokens)
    if ends >= _HARMONY:
        ends -= {"<|end|>"}  # there it ends one of several messages
    found = sorted(tokens.index(token) for token in ends)
    return list(dict.fromkeys([*(index for index in named if index is not None), *found]))
