"""Reads the header of a safetensors file: which tensors it has, and where their bytes are.

Files of adapters may come from anyone, and may change while they are read. Everything is checked
before it is used, and nothing is mapped into memory: a mapped file that shrinks would end the
process.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from penstock.protocol.errors import AdapterError

FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes of an element
_MAX_HEADER_BYTES = 2**25
_MAX_DIMS = 8
_MAX_NAME_LENGTH = 512  # bounds what matching and comparing names can take


class TensorInfo(NamedTuple):
    """One tensor of a file."""

    dtype: str  # one of FLOATS
    shape: tuple[int, ...]
    start: int  # from the start of the file
    end: int


def read_header(file: BinaryIO, path: Path) -> dict[str, TensorInfo]:
    """The tensors of an open file, by name. Raises AdapterError for anything but floats.

    Their bytes fill the file exactly, one after the other.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        raise _broken(path, f"its header would have {length} bytes, the file has {size}")
    try:
        header = json.loads(file.read(length))
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise _broken(path, "its header is no JSON object")
    first = 8 + length
    tensors = {
        name: _info(name, value, first, path)
        for name, value in header.items()
        if name != "__metadata__"
    }
    end = first
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start != end:
            raise _broken(path, f"tensor {name} overlaps another one, or follows a gap")
        end = info.end
    if end != size:
        raise _broken(path, f"its tensors end at byte {end}, but the file has {size}")
    return tensors


def _info(name: str, value: Any, first: int, path: Path) -> TensorInfo:
    if len(name) > _MAX_NAME_LENGTH:
        raise _broken(path, f"a tensor's name has {len(name)} characters: {name:.80}...")
    try:
        dtype, shape, (start, end) = value["dtype"], value["shape"], value["data_offsets"]
        numbers = [*shape, start, end]
    except (KeyError, TypeError, ValueError):
        raise _broken(path, f"the header's entry of tensor {name:.200} is incomplete") from None
    if not all(type(number) is int and 0 <= number < 2**48 for number in numbers):
        raise _broken(path, f"tensor {name:.200} has no valid shape and offsets")
    if dtype not in FLOATS:
        raise AdapterError(
            f"{path}: tensor {name:.200} has the type {dtype!r:.40}, but adapters have floats "
            f"({', '.join(FLOATS)}): save it as one of these"
        )
    if len(shape) > _MAX_DIMS or end - start != math.prod(shape) * FLOATS[dtype]:
        raise _broken(path, f"tensor {name:.200} has other sizes than its shape {shape!r:.80}")
    return TensorInfo(dtype, tuple(shape), first + start, first + end)


def _broken(path: Path, why: str) -> AdapterError:
    return AdapterError(f"{path}: truncated or corrupt: {why}; fetch or save it again")
