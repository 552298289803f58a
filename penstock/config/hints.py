"""Hints for names that are not known: what vLLM's table says, or else the nearest known name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from penstock.config.vllm_names import ForeignOption, find_foreign

CUTOFF = 0.75  # of the likeness of names, and of each of their words


def hint_for(
    name: str, known: Iterable[str], table: Mapping[str, ForeignOption] | None = None
) -> str | None:
    """A clause about `name`, an option or a flag, or about a key of `table`."""
    key = name.partition(".")[0]
    foreign = find_foreign(key) if table is None else table.get(_plain(key))
    if foreign is not None:
        return foreign.text
    near = nearest(name, known)
    if near is None:
        return None
    return f"did you mean {near if near.startswith('-') else repr(near)}?"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name of which `name` is a misspelling.

    Each of its words must be like one of the known name's: `enable_x` is none of `disable_x`.
    """
    spellings = {_plain(item): item for item in known}
    plain = _plain(name)
    for near in difflib.get_close_matches(plain, spellings, n=3, cutoff=CUTOFF):
        words = near.split("_")
        if all(any(_alike(word, other) for other in words) for word in plain.split("_")):
            return spellings[near]
    return None


def _alike(word: str, other: str) -> bool:
    if min(len(word), len(other)) >= 3 and (word.startswith(other) or other.startswith(word)):
        return True
    return difflib.SequenceMatcher(None, word, other).ratio() >= CUTOFF


def _plain(name: str) -> str:
    return name.removeprefix("--").replace("-", "_").lower()
