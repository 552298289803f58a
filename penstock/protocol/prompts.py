"""Prompts as dictionaries."""

from __future__ import annotations

from typing import TypedDict


class _Salted(TypedDict, total=False):
    cache_salt: str


class TextPrompt(_Salted):
    prompt: str


class TokensPrompt(_Salted):
    prompt_token_ids: list[int]
