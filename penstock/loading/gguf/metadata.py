"""Typed access to the metadata of a GGUF file's architecture."""

from __future__ import annotations

import math
import re
from typing import Any, NoReturn

import numpy as np

from penstock.loading.gguf.file import GGUFFile, GGUFTensor
from penstock.protocol.errors import ModelError

LAYER_OF_TENSOR = re.compile(r"^blk\.(0|[1-9][0-9]{0,5})\.")


def fail(file: GGUFFile, problem: str) -> NoReturn:
    raise ModelError(f"{file.path}: {problem}")


def find_tensor(file: GGUFFile, name: str, num_dims: int) -> GGUFTensor:
    tensor = file.tensors.get(name)
    if tensor is None:
        fail(file, f"tensor {name!r} is missing")
    if len(tensor.shape) != num_dims:
        fail(file, f"tensor {name!r} must have {num_dims} dimensions, got {list(tensor.shape)}")
    return tensor


class Metadata:
    """The keys with the prefix of the architecture's name."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.prefix = str(file.metadata.get("general.architecture"))

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.prefix}.{key}")

    def integer(self, key: str, default: int | None = None, low: int = 1) -> int:
        value = self.get(key)
        if value is None and default is not None:
            value = default
        if isinstance(value, list) and len(set(map(str, value))) == 1:
            value = value[0]  # one number per layer, all equal
        if type(value) is not int or not low <= value < 2**31:
            self._fail_value(key, value, "a positive integer" if low else "an integer from 0 on")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            value = default
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            self._fail_value(key, value, "a positive number")
        # Stored as float32. The shortest decimal is what config.json had (1e-05, not 9.99..e-06).
        return float(str(np.float32(value)))

    def numbers(self, key: str, count: int) -> list[float]:
        """`count` numbers, each as in `number`."""
        values = self.get(key)
        is_right = isinstance(values, list) and len(values) == count
        if not is_right or not all(type(each) is float and math.isfinite(each) for each in values):
            self._fail_value(key, values, f"{count} numbers")
        return [float(str(np.float32(value))) for value in values]

    def difference(self, key: str, size: int) -> int:
        """An integer minus `size`, which is a part of it."""
        whole = self.integer(key)
        if whole <= size:
            self._fail_value(key, whole, f"more than {size}")
        return whole - size

    def num_layers(self) -> int:
        """The number of layers, without multi-token-prediction (MTP) layers."""
        return self.difference("block_count", self.num_extra_layers())

    def num_extra_layers(self) -> int:
        return self.integer("nextn_predict_layers", default=0, low=0)

    def expert_size(self) -> int:
        """The intermediate size of one expert."""
        gate = self.first_tensor("ffn_down_exps.weight", num_dims=3)
        return self.integer("expert_feed_forward_length", default=gate.shape[2])

    def first_tensor(self, name: str, num_dims: int) -> GGUFTensor:
        """The tensor of this name in the first layer that has one."""
        layers = [
            int(found.group(1))
            for each in self.file.tensors
            if (found := LAYER_OF_TENSOR.match(each)) and each[found.end() :] == name
        ]
        if not layers:
            fail(self.file, f"no layer has a tensor {name!r}")
        return find_tensor(self.file, f"blk.{min(layers)}.{name}", num_dims)

    def token_id(self, kind: str) -> int | None:
        key = f"tokenizer.ggml.{kind}_token_id"
        value = self.file.metadata.get(key)
        if value is not None and (type(value) is not int or not 0 <= value < 2**31):
            fail(self.file, f"{key} must be a token id, got {value!r}")
        return value

    def has_tensor(self, name: str) -> bool:
        return name in self.file.tensors

    def floats(self, name: str) -> list[float]:
        """The numbers of a small float32 tensor."""
        tensor = find_tensor(self.file, name, num_dims=1)
        if tensor.type.name != "F32":
            fail(self.file, f"tensor {name!r} must be F32, got {tensor.type.name}")
        values: list[float] = self.file.view(name).view("<f4").tolist()
        return values

    def _fail_value(self, key: str, value: Any, wanted: str) -> NoReturn:
        shown = "nothing" if value is None else repr(value)[:80]
        fail(self.file, f"metadata {self.prefix}.{key} must be {wanted}, got {shown}")
