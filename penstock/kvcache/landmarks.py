"""Landmarks: the few blocks of a prefix that stand for all of it where prefixes are compared.

The first 64 blocks of a prefix are landmarks. Beyond that, they are spaced at about 1/32 of their
position. So a prefix of a million tokens has some 400 of them, and the length that two prefixes
share is known to within 3 %. An engine reports its cached landmarks, and a router looks for those
of a request. A wrong answer costs cache hits, never tokens, so 8 bytes of a hash are enough.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence

from penstock.kvcache.hashing import INT32_BYTES, hash_root, with_media
from penstock.protocol.prefix import CacheUpdate, PrefixKeys
from penstock.protocol.request import EngineRequest

KEY_BYTES = 8
PRECISION_BITS = 5  # landmarks are spaced at 2**-5 of their position, or less


def _spacing(num_blocks: int) -> int:
    return 1 << max(num_blocks.bit_length() - PRECISION_BITS - 1, 0)


def is_landmark(num_blocks: int) -> bool:
    """Whether the end of a prefix of `num_blocks` blocks is a landmark."""
    return num_blocks % _spacing(num_blocks) == 0


def landmarks(keys: PrefixKeys, request: EngineRequest) -> list[tuple[int, bytes]]:
    """The landmarks of a request, as an engine with `keys` hashes them: (tokens, key), in order."""
    adapter = request.adapter.digest if request.adapter is not None else None
    root = hash_root(keys.model_fingerprint, keys.kv_dtype, request.cache_salt, adapter)
    token_ids = request.prompt_token_ids + request.output_token_ids
    num_blocks, block_bytes = len(token_ids) // keys.block_size, keys.block_size * INT32_BYTES
    packed = struct.pack(f"<{len(token_ids)}i", *token_ids)
    media = [(item.offset, item.hash) for item in request.media]
    hashed, found = hashlib.sha256(root), []
    start, end = 0, 1
    while end <= num_blocks:
        tokens = packed[start * block_bytes : end * block_bytes]
        if media:
            tokens = with_media(tokens, start * keys.block_size, media)
        hashed.update(tokens)
        found.append((end * keys.block_size, hashed.digest()[:KEY_BYTES]))
        start, end = end, end + _spacing(end)
    return found


def split_keys(joined: bytes) -> Iterable[bytes]:
    """The keys of one half of a `CacheUpdate`."""
    return (key for (key,) in struct.iter_unpack(f"{KEY_BYTES}s", joined))


class CacheReport:
    """Collects what happens to the landmarks of a prefix cache, for those who follow it."""

    def __init__(self, hashes: Iterable[bytes]) -> None:
        """`hashes` are cached already. They are in the first update."""
        self._cached = {block_hash[:KEY_BYTES] for block_hash in hashes}
        self._changes = dict.fromkeys(self._cached, True)  # by key: whether it is cached now
        self._cleared = False

    def on_stored(
        self, request: object, numbers: Sequence[int], hash_of: Callable[[int], bytes]
    ) -> None:
        for number in numbers:
            if is_landmark(number + 1):
                key = hash_of(number)[:KEY_BYTES]
                self._cached.add(key)
                self._changes[key] = True

    def on_removed(self, block_hash: bytes) -> None:
        key = block_hash[:KEY_BYTES]
        if key in self._cached:
            self._cached.remove(key)
            self._changes[key] = False

    def on_cleared(self) -> None:
        self._cached.clear()
        self._changes.clear()
        self._cleared = True

    def take(self) -> CacheUpdate | None:
        """The changes since the last call. None: there are none."""
        if not self._changes and not self._cleared:
            return None
        changes, self._changes = self._changes, {}
        cleared, self._cleared = self._cleared, False
        stored = b"".join(key for key, is_cached in changes.items() if is_cached)
        removed = b"".join(key for key, is_cached in changes.items() if not is_cached)
        return CacheUpdate(stored, removed, cleared)
