"""Tiny tokenizers, made on the fly."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from penstock.text.detokenizer import byte_level_alphabet

SPECIAL = ["<s>", "</s>"]


def _merges(words: list[str], space: str) -> list[tuple[str, str]]:
    merges = [("t", "h"), ("th", "e"), ("c", "a"), ("ca", "t"), ("s", "a"), ("sa", "t")]
    merges += [("H", "e"), ("l", "l"), ("ll", "o"), ("He", "llo")]
    return merges + [(space, word) for word in words]


def byte_level_backend() -> Tokenizer:
    """Ids 0 and 1 are special, then all 256 bytes, then merges, some of them half characters."""
    return Tokenizer.from_str(_byte_level_json())


@cache
def _byte_level_json() -> str:
    spelled = {byte: char for char, byte in byte_level_alphabet().items()}
    space = spelled[ord(" ")]
    merges = _merges(["the", "cat", "sat"], space)
    # "😀" is f0 9f 98 80 and "€" e2 82 ac: tokens that end in the middle of them
    merges += [(spelled[0xF0], spelled[0x9F]), (spelled[0x98], spelled[0x80])]
    merges += [(spelled[0x82], spelled[0xAC]), (space, spelled[0xE2])]
    tokens = SPECIAL + [spelled[byte] for byte in range(256)] + [a + b for a, b in merges]
    backend = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return str(backend.to_str())


def sentencepiece_like_backend() -> Tokenizer:
    """Ids 0, 1 and 2 are special, then all 256 bytes as <0xNN>, then letters and merges."""
    return Tokenizer.from_str(_sentencepiece_like_json())


@cache
def _sentencepiece_like_json() -> str:
    merges = [*_merges(["the", "cat", "sat"], "▁"), ("▁", "▁")]
    tokens = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    tokens += list("abcdefghijklmnopqrstuvwxyzH") + [a + b for a, b in merges]
    backend = Tokenizer(
        models.BPE(
            {t: i for i, t in enumerate(tokens)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", *SPECIAL]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return str(backend.to_str())


def word_backend() -> Tokenizer:
    """Whole words without a decoder: the library joins them with spaces."""
    words = ["<unk>", "the", "cat", "sat", "on", "mat"]
    backend = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken("<unk>", special=True)])
    return backend
