"""How others follow an engine's prefix cache: what its hashes start from, and what changed."""

from __future__ import annotations

import msgspec


class PrefixKeys(msgspec.Struct, frozen=True):
    """What a prefix cache's hashes cover besides tokens, salt and adapter.

    With it, any process computes the hashes of a request as the engine does.
    """

    model_fingerprint: str
    kv_dtype: str
    block_size: int  # tokens


class CacheUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Changes of a prefix cache since the last update: `removed` first, then `stored`.

    Both are keys of landmarks (`kvcache/landmarks.py`), joined.
    """

    stored: bytes = b""
    removed: bytes = b""
    cleared: bool = False  # everything was removed before
