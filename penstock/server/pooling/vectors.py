"""Formats vectors: as JSON numbers or as base64 bytes."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Sequence
from typing import Any

from penstock.protocol.delta import EngineDelta
from penstock.protocol.pooling import NAMED, VectorName
from penstock.protocol.request import EngineRequest
from penstock.server.pooling.protocol import (
    EmbedDtype,
    EncodingFormat,
    MediaTokens,
    PoolingUsage,
)


def vector_of(delta: EngineDelta) -> Any:
    assert delta.payload is not None, "requests that failed do not get this far"
    return delta.payload.to_numpy()


def write_vector(
    delta: EngineDelta, encoding: EncodingFormat | None, dtype: EmbedDtype | None
) -> list[Any] | str:
    return _write(vector_of(delta), encoding, dtype)


def write_named(
    delta: EngineDelta,
    names: Sequence[VectorName],
    encoding: EncodingFormat | None,
    dtype: EmbedDtype | None,
) -> dict[str, Any]:
    """The vectors of these names. Sparse ones are numbers in any encoding."""
    written: dict[str, Any] = {}
    for name in names:
        parts = [delta.named[part].to_numpy() for part in NAMED[name]]
        if name == "sparse":
            token_ids, weights = (part.tolist() for part in parts)
            written[name] = {"token_ids": token_ids, "weights": weights}
        else:
            written[name] = _write(parts[0] if parts else vector_of(delta), encoding, dtype)
    return written


def _write(
    vector: Any, encoding: EncodingFormat | None, dtype: EmbedDtype | None
) -> list[Any] | str:
    if encoding != "base64":
        numbers: list[Any] = vector.tolist()
        return numbers
    return base64.b64encode(as_bytes(vector, dtype or "float32")).decode()


def as_bytes(vector: Any, dtype: EmbedDtype) -> bytes:
    """Convert a vector to little-endian bytes in C order."""
    import numpy as np  # imported only when requested

    if dtype == "bfloat16":  # not in numpy: the upper half of a float32, rounded to even
        bits = np.ascontiguousarray(vector, np.float32).view(np.uint32).astype(np.uint64)
        return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")).tobytes()
    return np.ascontiguousarray(vector).astype("<f2" if dtype == "float16" else "<f4").tobytes()


def usage_of(requests: Sequence[EngineRequest]) -> PoolingUsage:
    num_tokens = sum(len(request.prompt_token_ids) for request in requests)
    usage = PoolingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
    items = [item for request in requests for item in request.media]
    if items:
        num_rows = Counter[str]()
        for item in items:
            num_rows[item.modality] += item.num_rows
        usage.prompt_tokens_details = MediaTokens(
            image_tokens=num_rows["image"], video_tokens=num_rows["video"]
        )
    return usage
