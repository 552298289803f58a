"""The API keys of a server, and the names under which its logs show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.protocol.errors import ConfigError

MAX_NAME_LENGTH = 64
MIN_PADDED_LENGTH = 16  # of a key that ends in =, as base64 does


@dataclass(frozen=True)
class ApiKey:
    name: str
    key: str


def parse_api_keys(option: str, texts: Sequence[str], prefix: str) -> list[ApiKey]:
    """Read ``KEY`` or ``NAME=KEY``. A key without a name is called by `prefix` and its number.

    Raises `ConfigError`, which shows no key.
    """
    return [
        _parse(f"{option} number {number}", text, f"{prefix}{number}")
        for number, text in enumerate(texts, 1)
    ]


def _parse(option: str, text: str, default_name: str) -> ApiKey:
    if not text:
        raise ConfigError(f"{option} must not be empty")
    name, equals, key = text.partition("=")
    if not key.strip("="):
        is_padded = len(text) >= MIN_PADDED_LENGTH and len(text) % 4 == 0
        if equals and not is_padded:
            raise ConfigError(f"{option} must be KEY or NAME=KEY, but nothing follows the =")
        return ApiKey(default_name, text)
    if not (0 < len(name) <= MAX_NAME_LENGTH and name.isprintable()):
        raise ConfigError(
            f"{option} contains =, so it must be NAME=KEY, with a name of 1 to {MAX_NAME_LENGTH} "
            "printable characters"
        )
    return ApiKey(name, key)
