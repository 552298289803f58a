"""What a prefix is called: the sha256 of its tokens, after each of fixed units.

The name of a unit covers everything before it, so equal names mean equal prefixes. Nothing in it
depends on the process: engines with the same model may share blocks by name.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence

INT32_BYTES = 4
NO_TOKEN = -1  # so that media cannot be taken for tokens


def hash_root(
    model_fingerprint: str,
    kv_dtype: str,
    cache_salt: str | None = None,
    adapter: str | None = None,
) -> bytes:
    """What a chain starts from: everything besides the tokens that shapes keys and values."""
    fields = json.dumps([model_fingerprint, kv_dtype, cache_salt, adapter])
    return hashlib.sha256(fields.encode("ascii")).digest()


class HashChain:
    """The hashes of one request's full units, extended as its tokens become known.

    `media` maps the position of a media item's first token to the hash of its content, since its
    placeholder tokens say nothing about it.
    """

    def __init__(self, root: bytes, unit: int, media: Mapping[int, bytes] | None = None) -> None:
        self.hashes: list[bytes] = []  # one for each full unit
        self._hash = hashlib.sha256(root)  # of all units so far
        self._unit = unit
        self._media = sorted(media.items()) if media else ()

    def extend(self, token_ids: Sequence[int]) -> None:
        """Hash the units of `token_ids` that are full and not hashed yet."""
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
        """Where media begin in the unit from position `start` on, each with its hash."""
        return b"".join(
            struct.pack("<2i", NO_TOKEN, position - start) + content
            for position, content in self._media
            if start <= position < start + self._unit
        )
