"""HashChain: decides the hash by which a prefix is found in the cache.

A prefix is hashed with SHA-256 in units of a fixed number of tokens. The hash of a unit covers
everything before it, so equal hashes mean equal prefixes. Hashes do not depend on the process:
engines with the same model compute the same ones.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence

INT32_BYTES = 4
NO_TOKEN = -1  # precedes the hash of media


def hash_root(
    model_fingerprint: str,
    kv_dtype: str,
    cache_salt: str | None = None,
    adapter: str | None = None,
) -> bytes:
    """The start of a chain. Covers everything except the tokens that affects keys and values."""
    fields = json.dumps([model_fingerprint, kv_dtype, cache_salt, adapter])
    return hashlib.sha256(fields.encode("ascii")).digest()


class HashChain:
    """The hashes of one request's full units, extended as its tokens become known.

    `media` maps the position of a media item's first token to the hash of its content. It is
    needed because placeholder tokens are the same for all content.
    """

    def __init__(self, root: bytes, unit: int, media: Mapping[int, bytes] | None = None) -> None:
        self.hashes: list[bytes] = []  # one for each full unit
        self._hash = hashlib.sha256(root)  # of all units so far
        self._unit = unit
        self._media = list(media.items()) if media else []

    def extend(self, token_ids: Sequence[int]) -> None:
        """Hash the new full units of `token_ids`."""
        start = len(self.hashes) * self._unit
        end = len(token_ids) // self._unit * self._unit
        packed = struct.pack(f"<{max(end - start, 0)}i", *token_ids[start:end])
        update, digest, append = self._hash.update, self._hash.digest, self.hashes.append
        for (tokens,) in struct.iter_unpack(f"{INT32_BYTES * self._unit}s", packed):
            if self._media:
                tokens = with_media(tokens, len(self.hashes) * self._unit, self._media)
            update(tokens)
            append(digest())


def with_media(packed: bytes, first: int, media: Iterable[tuple[int, bytes]]) -> bytes:
    """Packed tokens from position `first` on, with the hash of each item before its first token."""
    end = first + len(packed) // INT32_BYTES
    for position, content in sorted(media, reverse=True):
        if first <= position < end:
            at = (position - first) * INT32_BYTES
            packed = packed[:at] + struct.pack("<i", NO_TOKEN) + content + packed[at:]
    return packed
