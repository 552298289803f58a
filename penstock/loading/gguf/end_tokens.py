"""Which tokens end an answer. Files often name one, and leave the others to their spelling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEYS = ("eos", "eot", "eom")  # of text, of a turn, of a message with a tool call
# By their text, whatever a file says: the ends of turns of the families that have them.
_TURN_ENDS = frozenset(
    {
        "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|end_of_turn|>",
        "<end_of_utterance>", "<|return|>", "<|call|>", "<|end|>",
    }
)  # fmt: skip
_HARMONY = frozenset({"<|return|>", "<|call|>"})


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """The end of text first, where the file names it."""
    named = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in _KEYS]
    found = {
        token: index
        for index, token in enumerate(metadata.get("tokenizer.ggml.tokens") or ())
        if token in _TURN_ENDS
    }
    if found.keys() >= _HARMONY:
        found.pop("<|end|>", None)  # ends one message of several there
    return list(dict.fromkeys([*(index for index in named if index is not None), *found.values()]))
