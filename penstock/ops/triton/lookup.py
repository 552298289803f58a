"""Finds the request of a program, in launches over the tiles of all requests."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_request(query_starts_ptr, tile, first_request, num_requests, QUERIES: tl.constexpr):
    """The request that tile number `tile`, counted from `first_request`, belongs to, and its tile.

    Request i's tiles begin at or after (query_starts[i] - query_starts[first]) // QUERIES + i -
    first. That leaves each request at least the tiles it needs.
    """
    base = tl.load(query_starts_ptr + first_request)
    low, high = first_request, first_request + num_requests
    while low < high - 1:
        middle = (low + high) // 2
        begin = (tl.load(query_starts_ptr + middle) - base) // QUERIES + middle - first_request
        if begin <= tile:
            low = middle
        else:
            high = middle
    begin = (tl.load(query_starts_ptr + low) - base) // QUERIES + low - first_request
    return low, tile - begin
