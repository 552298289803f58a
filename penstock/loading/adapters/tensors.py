"""Reads the weights of a PEFT adapter from its safetensors file."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import torch

from penstock.loading.adapters.header import TensorInfo, read_header
from penstock.protocol.errors import AdapterError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

# The last part of a tensor's name -> what it is. Some tools leave the adapter's name in.
_KINDS = tuple(
    (re.compile(rf"(?P<module>.+?){ending}"), kind)
    for ending, kind in (
        (r"\.lora_A(\.default)?\.weight", "a"),
        (r"\.lora_B(\.default)?\.weight", "b"),
        (r"\.lora_B(\.default)?\.bias", "bias"),
        (r"\.lora_embedding_A(\.default)?(\.weight)?", "embedding_a"),
        (r"\.lora_embedding_B(\.default)?(\.weight)?", "embedding_b"),
        (r"\.lora_magnitude_vector(\.default)?(\.weight)?", "magnitude"),
        (r"\.token_adapter\.trainable_tokens_delta(\.default)?", "tokens"),
        (r"(\.base_layer|\.modules_to_save(\.default)?)?\.bias", "whole_bias"),
        (r"\.base_layer\.weight", "copy"),
        (r"(\.modules_to_save(\.default)?)?\.weight", "whole"),
    )
)


class TensorName(NamedTuple):
    """What a tensor is of a module. `module` has the name that peft gives it."""

    module: str
    kind: str


class Weights(Protocol):
    """The tensors of an adapter under peft's names."""

    infos: dict[str, TensorInfo]

    def load(self, digest: hashlib._Hash) -> None:
        """Read the whole file, and add its bytes to the digest. Call it before `tensor`."""

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor in its own memory."""


def parse_name(name: str, path: Path) -> TensorName:
    """Split a tensor's name. Raises AdapterError for tensors that are not LoRA's."""
    own = name.removeprefix("base_model.model.")
    for pattern, kind in _KINDS:
        if match := pattern.fullmatch(own):
            return TensorName(match["module"], kind)
    raise AdapterError(
        f"{path}: tensor {name:.200} is not known from LoRA: adapters of other methods are not "
        "supported"
    )


def is_spare(name: str, names: Container[str]) -> bool:
    """Whether a tensor is one that peft writes but does not load.

    With `bias="all"`, it writes those of saved modules twice, and the base's.
    """
    plain = re.sub(r"\.modules_to_save(\.default)?(?=\.)", "", name)
    return ".original_module." in name or (plain != name and plain in names)


class SafetensorsWeights:
    """The tensors of adapter_model.safetensors, through one open file."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self.infos = read_header(file, path)
        self._data = b""

    def load(self, digest: hashlib._Hash) -> None:
        self._data = read_whole(self._file, self._path)
        digest.update(self._data)

    def tensor(self, name: str) -> torch.Tensor:
        info = self.infos[name]
        if info.end > len(self._data):
            raise AdapterError(f"{self._path}: became shorter while it was read; load it again")
        own = bytearray(memoryview(self._data)[info.start : info.end])
        dtype = _DTYPES[info.dtype]
        return (
            torch.frombuffer(own, dtype=dtype).view(info.shape) if own else torch.empty(info.shape)
        )


def read_whole(file: BinaryIO, path: Path) -> bytes:
    """The bytes of an open file, as many as it has now."""
    try:
        file.seek(0)
        return file.read()
    except OSError as error:
        raise AdapterError(f"{path}: cannot be read: {error}") from error
