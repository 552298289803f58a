"""HashChain: decides the hash by which a prefix is found in the cache.

A prefix is hashed with SHA-256 in units of a fixed number of tokens. The hash of a unit covers
everything before it, so equal hashes mean equal prefixes. Hashes do not depend on the process:
engines with the same model compute the same ones.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence

INT32_BYTES = 4
NO_TOKEN = -1  # separates media from tokens in the hash


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
        self._media = sorted(media.items()) if media else ()

    def extend(self, token_ids: Sequence[int]) -> None:
        """Hash the new full units of `token_ids`."""
        start = len(self.hashes) * self._unit
        end = len(token_ids) // self._unit * self._unit
        packed = struct.pack(f"<{max(end - start, 0)}i", *token_ids[start:end])
        update, digest, append = self._hash.update, self._hash.digest, self.hashes.append
        for (tokens,) in struct.iter_unpack(f"{INT32_BYTES * self._unit}s", packed):
            update(tokens)
            if self._media:
                update(self._media_within(len(self.hashes) * self._unit))
            append(digest())

    def _media_within(self, start: int) -> bytes:
        """Offset and hash of each media item that begins in the unit at position `start`."""
        return b"".join(
            struct.pack("<2i", NO_TOKEN, position - start) + content
            for position, content in self._media
            if start <= position < start + self._unit
        )
