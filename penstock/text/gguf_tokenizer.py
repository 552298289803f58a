"""Builds a tokenizer from GGUF metadata: byte-level BPE ("gpt2") or SentencePiece BPE ("llama").

The metadata names the pre-tokenizer of byte-level BPE (`tokenizer.ggml.pre`). Each reader of the
format must know its regular expressions: `PRE_TOKENIZERS` is that table.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from penstock.protocol.errors import ModelError

REMEDY = "give a folder with tokenizer.json as tokenizer=, or run with skip_tokenizer_init"

# Special tokens in chat templates, and the metadata keys of their ids.
SPECIAL_TOKEN_KEYS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


class TokenType(enum.IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class PreTokenizer:
    """How a text is split into words before byte-level BPE."""

    patterns: tuple[str, ...]  # each splits the results of the previous ones
    nfc: bool = False  # apply NFC first
    ignore_merges: bool = False  # a word that is a token needs no merges
    add_bos: bool = False  # default if the metadata has no entry


_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased_words(contraction: str) -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{_UPPER}*{_LOWER}+{contraction}|{start}{_UPPER}+{_LOWER}*{contraction}"


_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_PATTERN = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION_AND_SPACE}"
_QWEN2_PATTERN = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_PUNCTUATION_AND_SPACE}"
_TEKKEN_PATTERN = rf"{_cased_words('')}|\p{{N}}|{_CASED_PUNCTUATION_AND_SPACE}"
_GPT4O_PATTERN = (
    rf"{_cased_words(_CONTRACTION + '?')}|\p{{N}}{{1,3}}|{_CASED_PUNCTUATION_AND_SPACE}"
)
_DEEPSEEK3_PATTERN = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Cased letters, except those that DeepSeek's list omits.
_DEEPSEEK_LETTERS = (
    "[\\p{Lu}\\p{Ll}\\p{Lt}&&[^\u0560-\u0588\u10c7\u10cd\u10d0-\u10ff\u1c80-\u1c88\u2d00-\u2d2d"
    "\ua790-\ua7fa\uab30-\uab68\U00010570-\U000105bc\U00016e40-\U00016e7f\U0001d400-\U0001d7cb"
    "\U0001df00-\U0001df1e]]"
)
# Chinese, Japanese and Korean, and the range between, as in DeepSeek's first models.
_DEEPSEEK_EAST = "[\u0800-\u9fa5\uac00-\ud7ff]+"
_DEEPSEEK_PUNCTUATION = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_KIMI_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI_PATTERN = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}|{_PUNCTUATION_AND_SPACE}"
)

_GPT2 = PreTokenizer((_GPT2_PATTERN,))
_DIGITS_THEN_GPT2 = PreTokenizer((r"\p{N}", _GPT2_PATTERN))
_LLAMA3 = PreTokenizer((_LLAMA3_PATTERN,), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((_QWEN2_PATTERN,), nfc=True)

_BY_NAMES: dict[tuple[str, ...], PreTokenizer] = {
    ("default", "gpt-2", "gpt2", "mpt", "olmo", "jais", "phi-2", "roberta-bpe", "exaone4"): _GPT2,
    ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"): _DIGITS_THEN_GPT2,
    ("command-r",): PreTokenizer((r"\p{N}", _GPT2_PATTERN), nfc=True),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"): _LLAMA3,
    ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"): PreTokenizer((_LLAMA3_PATTERN,)),
    ("qwen2", "deepseek-r1-qwen", "megrez", "hunyuan"): _QWEN2,
    ("stablelm2",): PreTokenizer((_QWEN2_PATTERN,)),
    ("tekken",): PreTokenizer((_TEKKEN_PATTERN,), ignore_merges=True, add_bos=True),
    ("gpt-4o", "llama4", "minimax-m2"): PreTokenizer((_GPT4O_PATTERN,)),
    ("kimi-k2",): PreTokenizer((_KIMI_PATTERN,)),
    ("deepseek-llm",): PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?{_DEEPSEEK_LETTERS}+",
            _DEEPSEEK_PUNCTUATION,
            r"\s+$",
            _DEEPSEEK_EAST,
            r"\p{N}+",
        )
    ),
    ("deepseek-coder",): PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_EAST, r"\p{N}")
    ),
    ("deepseek-v3",): PreTokenizer(
        (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3_PATTERN)
    ),
}
PRE_TOKENIZERS = {name: how for names, how in _BY_NAMES.items() for name in names}


def gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that GGUF metadata describes. Raises ModelError if it cannot be built."""
    vocabulary = _Vocabulary.read(metadata)
    kind = metadata.get("tokenizer.ggml.model")
    try:
        if kind == "gpt2":
            tokenizer, add_bos = _byte_level_bpe(metadata, vocabulary)
        elif kind == "llama":
            vocabulary = vocabulary.with_plain_spaces()
            tokenizer, add_bos = _sentencepiece_bpe(metadata, vocabulary), True
        else:
            raise ModelError(f"tokenizer.ggml.model must be gpt2 or llama, got {kind!r}: {REMEDY}")
        vocabulary.add_special_tokens(tokenizer)
        _frame(tokenizer, metadata, add_bos)
    except ModelError:
        raise
    except Exception as error:  # the library raises bare Exceptions, such as for a bad merge
        raise ModelError(
            f"the tokenizer in the GGUF metadata is broken ({error}): {REMEDY}"
        ) from error
    return tokenizer


def gguf_special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that chat templates may name, such as `bos_token`."""
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    ids = {name: metadata.get(key) for name, key in SPECIAL_TOKEN_KEYS.items()}
    return {name: tokens[i] for name, i in ids.items() if i is not None and 0 <= i < len(tokens)}


@dataclass(frozen=True)
class _Vocabulary:
    tokens: list[str]  # by id
    types: list[int]

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> _Vocabulary:
        tokens = metadata.get("tokenizer.ggml.tokens")
        if not tokens:
            raise ModelError(f"the GGUF metadata has no tokenizer.ggml.tokens: {REMEDY}")
        types = metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
        if len(types) != len(tokens):
            raise ModelError(
                f"tokenizer.ggml.token_type must have one entry for each of {len(tokens)} tokens, "
                f"got {len(types)}: {REMEDY}"
            )
        return cls(tokens, types)

    def with_plain_spaces(self) -> _Vocabulary:
        """User-defined tokens with plain spaces: they are matched before spaces become ▁."""
        tokens = [
            token.replace("▁", " ") if type_ == TokenType.USER_DEFINED else token
            for token, type_ in zip(self.tokens, self.types, strict=True)
        ]
        return _Vocabulary(tokens, self.types)

    def of_type(self, kind: TokenType) -> list[str]:
        return [
            token for token, type_ in zip(self.tokens, self.types, strict=True) if type_ == kind
        ]

    def add_special_tokens(self, tokenizer: Tokenizer) -> None:
        tokenizer.add_special_tokens(
            [AddedToken(t, special=True, normalized=False) for t in self.of_type(TokenType.CONTROL)]
        )
        tokenizer.add_tokens(
            [
                AddedToken(t, special=False, normalized=False)
                for t in self.of_type(TokenType.USER_DEFINED)
            ]
        )


def _byte_level_bpe(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"tokenizer.ggml.pre = {name!r} is unknown; known: "
            f"{', '.join(sorted(PRE_TOKENIZERS))}: {REMEDY}"
        )
    how = PRE_TOKENIZERS[name]
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=how.ignore_merges))
    if how.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in how.patterns]
    to_bytes = pre_tokenizers.ByteLevel(
        add_prefix_space=bool(metadata.get("tokenizer.ggml.add_space_prefix", False)),
        use_regex=False,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, how.add_bos


def _sentencepiece_bpe(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(vocabulary.tokens):
        raise ModelError(
            f"tokenizer.ggml.scores must have one entry for each of {len(vocabulary.tokens)} "
            f"tokens, got {0 if scores is None else len(scores)}: {REMEDY}"
        )
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    unknown = vocabulary.of_type(TokenType.UNKNOWN)
    tokenizer = Tokenizer(
        models.BPE(
            ids,
            _merges_from_scores(vocabulary, scores),
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=bool(vocabulary.of_type(TokenType.BYTE)),
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        decoding.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _merges_from_scores(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair with the best-scoring union. Returns such pairs by rank."""
    ids = {
        token: index
        for index, (token, type_) in enumerate(
            zip(vocabulary.tokens, vocabulary.types, strict=True)
        )
        if type_ in (TokenType.NORMAL, TokenType.UNUSED)
    }
    ranked = []
    for token, index in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[index], index, ids[left], ids[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _frame(tokenizer: Tokenizer, metadata: Mapping[str, Any], add_bos: bool) -> None:
    """Add the tokens that begin and end each prompt."""
    special = gguf_special_tokens(metadata)
    bos, eos = special.get("bos_token"), special.get("eos_token")
    template: list[str] = ["$A"]
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", add_bos):
        template.insert(0, bos)
    if eos is not None and metadata.get("tokenizer.ggml.add_eos_token", False):
        template.append(eos)
    if len(template) > 1:
        used = {t: tokenizer.token_to_id(t) for t in template if t != "$A"}
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=list(used.items())
        )
