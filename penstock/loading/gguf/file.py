"""Reads a GGUF file's header: its metadata, and where the bytes of each tensor are.

Every value is checked against the file's size before it is used, so a corrupt or truncated file
gives a ModelError at once. Tensor bytes stay on disk until a view of them is requested. This module
does not import torch: the API process also reads tokenizers from GGUF files.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from penstock.protocol.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # the same layout; version 1 had 32-bit lengths
_DEFAULT_ALIGNMENT = 32

# Far above any real file. They bound what a corrupt count can make us allocate.
_MAX_METADATA_ENTRIES = 2**16
_MAX_TENSORS = 2**20
_MAX_ARRAY_LENGTH = 2**22
_MAX_STRING_BYTES = 2**24
_MAX_ARRAY_DEPTH = 4
_MAX_DIMS = 4

_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class GGMLType(NamedTuple):
    """How elements are stored: quantization blocks of `block_size` in `block_bytes` bytes."""

    name: str
    block_size: int
    block_bytes: int


GGML_TYPES: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    9: GGMLType("Q8_1", 32, 40),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
    40: GGMLType("NVFP4", 64, 36),
    41: GGMLType("Q1_0", 128, 18),
}
# Types that llama.cpp has or had, and that are not supported.
_UNREAD = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip


class GGUFTensor(NamedTuple):
    """One tensor of a file: its type and shape, and where its bytes are."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]  # row-major as in torch: the last dimension is contiguous
    offset: int  # from the start of the file
    nbytes: int
    path: Path | None = None  # its own file, if the model is split


@dataclass(frozen=True)
class GGUFFile:
    """A file's header. It holds no open file, so it may be kept and pickled."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]  # in file order
    paths: tuple[Path, ...] = ()  # of all files of a split model

    def view(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor, mapped from disk: [nbytes]. Writes never reach the file."""
        tensor = self.tensors[name]
        path = tensor.path or self.path
        start = tensor.offset % mmap.ALLOCATIONGRANULARITY  # in the pages that hold it
        length, offset = start + tensor.nbytes, tensor.offset - start
        try:
            with path.open("rb") as file:
                pages = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=offset)
            return np.frombuffer(pages, dtype=np.uint8, offset=start)
        except (OSError, ValueError) as error:
            raise ModelError(
                f"{path}: cannot map tensor {name!r}; did the file change? ({error})"
            ) from error


def read_gguf(path: str | Path) -> GGUFFile:
    """Read the header of a GGUF file (version 2 or 3, little endian).

    Raises ModelError, which names the file and the problem, for anything else.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise ModelError(f"{path}: not a GGUF file: it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).read()
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error


def parse_gguf(path: Path, data: bytes) -> GGUFFile:
    """Like `read_gguf`, of a file's bytes."""
    return _Reader(path, data).read()


class _Reader:
    """Reads the header from front to back; `position` is the current offset."""

    def __init__(self, path: Path, data: mmap.mmap | bytes) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = 0

    def read(self) -> GGUFFile:
        self._check_magic_and_version()
        num_tensors = self._count("tensor count", _MAX_TENSORS)
        num_entries = self._count("metadata count", _MAX_METADATA_ENTRIES)
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string("a metadata key")
            if key in metadata:
                self._fail(f"metadata key {key!r} occurs twice")
            metadata[key] = self._value(self._u32(f"the type of {key!r}"), key)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        return GGUFFile(self.path, metadata, self._place(infos, self._alignment(metadata)))

    def _check_magic_and_version(self) -> None:
        if self.data[:4] != _MAGIC:
            self._fail(f"not a GGUF file: it begins with {self.data[:4]!r}, not {_MAGIC!r}")
        self.position = 4
        version = self._u32("the version")
        if version in (int.from_bytes(_U32.pack(known), "big") for known in _VERSIONS):
            self._fail("a big-endian GGUF file; convert the model again as little-endian")
        if version not in _VERSIONS:
            self._fail(f"GGUF version {version} is not supported (versions 2 and 3 are)")

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
            self._fail(f"general.alignment must be a power of two up to 2^20, got {alignment!r}")
        return alignment

    def _tensor_info(self) -> GGUFTensor:
        """A tensor from the header. Its offset is still relative to the data section."""
        name = self._string("a tensor's name")
        num_dims = self._u32(f"the dimensions of tensor {name!r}")
        if not 1 <= num_dims <= _MAX_DIMS:
            self._fail(f"tensor {name!r} has {num_dims} dimensions, not 1 to {_MAX_DIMS}")
        dims = [self._u64(f"the shape of tensor {name!r}") for _ in range(num_dims)]
        if 0 in dims:
            self._fail(f"tensor {name!r} is empty: its shape is {dims[::-1]}")
        type_id = self._u32(f"the type of tensor {name!r}")
        if type_id not in GGML_TYPES:
            own = f"is of the type {_UNREAD.get(type_id, f'number {type_id}')}"
            self._fail(f"tensor {name!r} {own}, which is not read: take a file in, say, Q4_K_M")
        ggml_type = GGML_TYPES[type_id]
        if dims[0] % ggml_type.block_size:
            self._fail(
                f"tensor {name!r}: rows of {dims[0]} elements do not divide into "
                f"{ggml_type.name} blocks of {ggml_type.block_size}"
            )
        num_elements = 1
        for dim in dims:
            num_elements *= dim
        nbytes = num_elements // ggml_type.block_size * ggml_type.block_bytes
        offset = self._u64(f"the offset of tensor {name!r}")
        return GGUFTensor(name, ggml_type, tuple(reversed(dims)), offset, nbytes)

    def _place(self, infos: list[GGUFTensor], alignment: int) -> dict[str, GGUFTensor]:
        """Tensors by name, with offsets from the start of the file. Checks that all are inside."""
        start = (self.position + alignment - 1) // alignment * alignment
        tensors: dict[str, GGUFTensor] = {}
        for info in infos:
            if info.name in tensors:
                self._fail(f"tensor {info.name!r} occurs twice")
            if info.offset % alignment:
                self._fail(
                    f"tensor {info.name!r} lies at offset {info.offset}, "
                    f"not a multiple of the alignment {alignment}"
                )
            end = start + info.offset + info.nbytes
            if end > self.size:
                self._fail(
                    f"tensor {info.name!r} ends at byte {end}, but the file has only "
                    f"{self.size}: it is truncated or corrupt; fetch it again"
                )
            tensors[info.name] = info._replace(offset=start + info.offset)
        return tensors

    def _value(self, value_type: int, key: str, depth: int = 0) -> Any:
        if value_type == _STRING:
            return self._string(f"the value of {key!r}")
        if value_type == _ARRAY:
            return self._array(key, depth + 1)
        return self._numbers(value_type, 1, key)[0]

    def _array(self, key: str, depth: int) -> list[Any]:
        if depth > _MAX_ARRAY_DEPTH:
            self._fail(f"{key!r} nests arrays more than {_MAX_ARRAY_DEPTH} deep")
        item_type = self._u32(f"the item type of {key!r}")
        length = self._count(f"length of {key!r}", _MAX_ARRAY_LENGTH)
        if item_type == _STRING:
            return self._strings(length, key)
        if item_type == _ARRAY:
            return [self._array(key, depth + 1) for _ in range(length)]
        return self._numbers(item_type, length, key)

    def _numbers(self, value_type: int, count: int, key: str) -> list[Any]:
        code = "B" if value_type == _BOOL else _NUMBERS.get(value_type)
        if code is None:
            self._fail(f"{key!r} has the unknown value type {value_type}")
        layout = struct.Struct(f"<{count}{code}")
        start = self._take(layout.size, f"the value of {key!r}")
        values = layout.unpack_from(self.data, start)
        return [value != 0 for value in values] if value_type == _BOOL else list(values)

    def _strings(self, count: int, key: str) -> list[str]:
        """Like `count` calls of `_string`, without the overhead: for vocabularies."""
        data, size, position = self.data, self.size, self.position
        unpack = _U64.unpack_from
        strings: list[str] = []
        append = strings.append
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(data, position)[0]
                if position > size:
                    self._fail_truncated(f"an item of {key!r}")
                append(data[start:position].decode())
        except struct.error:
            self._fail_truncated(f"an item of {key!r}")
        except UnicodeDecodeError:
            self._fail(f"item {len(strings)} of {key!r} is not UTF-8")
        self.position = position
        return strings

    def _string(self, what: str) -> str:
        length = self._u64(f"the length of {what}")
        if length > _MAX_STRING_BYTES:
            self._fail(f"{what} claims to be {length} bytes long")
        start = self._take(length, what)
        try:
            return self.data[start : self.position].decode()
        except UnicodeDecodeError:
            self._fail(f"{what}, at byte {start}, is not UTF-8")

    def _count(self, what: str, limit: int) -> int:
        count = self._u64(what)
        if count > limit:
            self._fail(f"{what} is {count}, more than any real file has ({limit})")
        return count

    def _u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self.data, self._take(4, what))[0]
        return value

    def _u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self.data, self._take(8, what))[0]
        return value

    def _take(self, num_bytes: int, what: str) -> int:
        """Advance by `num_bytes`, which must exist. Returns the old position."""
        start = self.position
        if start + num_bytes > self.size:
            self._fail_truncated(what)
        self.position = start + num_bytes
        return start

    def _fail_truncated(self, what: str) -> NoReturn:
        self._fail(
            f"the file ends (at byte {self.size}) inside {what}: it is truncated or corrupt; "
            "fetch it again"
        )

    def _fail(self, problem: str) -> NoReturn:
        raise ModelError(f"{self.path}: {problem}")
