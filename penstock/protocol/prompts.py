"""Prompts as dictionaries."""

from __future__ import annotations

from typing import TypedDict


class _Salted(TypedDict, total=False):
    cache_salt: str
    """Prompts share cached prefixes only with prompts of the same salt."""


class TextPrompt(_Salted):
    """A prompt as text."""

    prompt: str
    """The text."""


class TokensPrompt(_Salted):
    """A prompt as token IDs."""

    prompt_token_ids: list[int]
    """The tokens."""
