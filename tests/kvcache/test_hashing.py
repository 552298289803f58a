from __future__ import annotations

import hashlib
import struct

from penstock.kvcache.hashing import HashChain, hash_root

ROOT = hash_root("model", "float32")


def chain_of(token_ids, unit=2, **kwargs):
    chain = HashChain(kwargs.pop("root", ROOT), unit, **kwargs)
    chain.extend(token_ids)
    return chain.hashes


def test_a_name_is_the_sha256_of_all_tokens_so_far_and_the_same_in_every_process():
    root = hashlib.sha256(b'["model", "float32", null, null]').digest()
    first = hashlib.sha256(root + struct.pack("<2i", 1, 2)).digest()
    second = hashlib.sha256(root + struct.pack("<4i", 1, 2, 3, 4)).digest()
    assert chain_of([1, 2, 3, 4, 5]) == [first, second]
    assert first.hex().startswith("c8a9c3f2a65f6ddd")


def test_extending_piece_by_piece_gives_the_same_hashes_as_at_once():
    tokens = list(range(11))
    chain = HashChain(ROOT, 3)
    for end in range(len(tokens) + 1):
        chain.extend(tokens[:end])
    assert chain.hashes == chain_of(tokens, unit=3)
    assert len(chain.hashes) == 3


def test_every_field_of_the_root_separates_prefixes():
    roots = [
        hash_root("model", "float32"),
        hash_root("other", "float32"),
        hash_root("model", "float16"),
        hash_root("model", "float32", cache_salt=""),
        hash_root("model", "float32", cache_salt="x"),
        hash_root("model", "float32", adapter="x"),
    ]
    assert len(set(roots)) == len(roots)


def test_a_media_hash_changes_its_unit_and_all_after_it():
    plain = chain_of([7] * 6)
    picture = chain_of([7] * 6, media={2: b"cat"})
    moved = chain_of([7] * 6, media={3: b"cat"})
    assert plain[0] == picture[0] == moved[0]
    assert len({plain[1], picture[1], moved[1]}) == 3
    assert len({plain[2], picture[2], moved[2]}) == 3
