"""Builds a tokenizer from Mistral's tekken.json.

It lists the bytes of every token in the order in which they were learned, which is the order of
merges. Special tokens come before them and never match text.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from penstock.protocol.errors import ModelError
from penstock.text.detokenizer import byte_level_alphabet

FILE = "tekken.json"
# For files that do not list theirs.
SPECIAL_TOKENS = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]",
    "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)  # fmt: skip
MOST_SPECIAL_TOKENS = 2**16  # far more than the usual 1000
ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def read_tekken(folder: Path) -> Mapping[str, Any] | None:
    """The file in a folder, or None."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version_of(content)
        special_tokens_of(content)  # callers rely on both
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read: {error!r}") from error
    return content  # type: ignore[no-any-return]


def version_of(content: Mapping[str, Any]) -> int:
    """The version of the prompt format: 3, 7, 11, 13, ..."""
    text = str(content["config"].get("version", "v3")).lstrip("v")
    return int(text) if text.isdecimal() else 3


def special_tokens_of(content: Mapping[str, Any]) -> list[str]:
    """All special tokens, by id."""
    count = int(content["config"]["default_num_special_tokens"])
    if not 0 <= count <= MOST_SPECIAL_TOKENS:
        raise ValueError(
            f"default_num_special_tokens must be from 0 to {MOST_SPECIAL_TOKENS}, got {count}"
        )
    listed = content.get("special_tokens")
    named = {int(item["rank"]): str(item["token_str"]) for item in listed or ()}
    if not listed:
        named = dict(enumerate(SPECIAL_TOKENS))
    return [named.get(index, f"<SPECIAL_{index}>") for index in range(count)]


def tekken_backend(content: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer. Takes a few seconds: merges are derived from the tokens."""
    special = special_tokens_of(content)
    char_of = {byte: char for char, byte in byte_level_alphabet().items()}
    size = int(content["config"]["default_vocab_size"]) - len(special)
    spelled = [base64.b64decode(item["token_bytes"]) for item in content["vocab"][:size]]
    ranks = {token: rank for rank, token in enumerate(spelled)}

    def write(token: bytes) -> str:
        return "".join(char_of[byte] for byte in token)

    vocab = {write(token): rank + len(special) for token, rank in ranks.items()}
    vocab |= {token: index for index, token in enumerate(special)}
    merges = [
        (write(left), write(right)) for token in spelled for left, right in _pairs(token, ranks)
    ]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(content["config"]["pattern"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return backend


def _pairs(token: bytes, ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The ways to form `token` from two tokens, those learned first first."""
    splits = ((token[:at], token[at:]) for at in range(1, len(token)))
    found = [pair for pair in splits if pair[0] in ranks and pair[1] in ranks]
    return sorted(found, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
