"""Reads LoRA adapters that llama.cpp's convert_lora_to_gguf wrote, under peft's names.

Names and row orders are those of GGUF models, so the same rules are reversed. The embedding's first
matrix is stored transposed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from penstock.loading.adapters.config import AdapterConfig
from penstock.loading.adapters.header import TensorInfo
from penstock.loading.adapters.tensors import read_whole
from penstock.loading.gguf.checkpoint import unpermute_rope
from penstock.loading.gguf.config import map_tensors
from penstock.loading.gguf.dequant import check_supported, dequantize
from penstock.loading.gguf.file import GGML_TYPES, GGUFFile, GGUFTensor, parse_gguf
from penstock.loading.gguf.mapping import MappedTensor
from penstock.loading.gguf.rules import SplitExperts, Stored, UnpermuteRope
from penstock.protocol.errors import AdapterError, ModelError

_FLOAT32 = GGML_TYPES[0]
_ENDINGS = (".lora_a", ".lora_b")


class GgufAdapterWeights:
    """The tensors of a GGUF adapter. The file is read at once."""

    def __init__(self, file: BinaryIO, path: Path, model: Any) -> None:
        self._path = path
        self._data = read_whole(file, path)
        try:
            self._file = parse_gguf(path, self._data)
            self.config = _read_config(self._file)
            base, settings = self._base_file(model), _settings(model, path)
            found = map_tensors(base, settings)
            for tensor in self._file.tensors.values():
                check_supported(tensor, path)
        except AdapterError:
            raise
        except ModelError as error:
            raise AdapterError(str(error)) from error
        if surplus := set(base.tensors) - {mapped.tensor.name for mapped in found}:
            raise AdapterError(
                f"{path} changes {min(surplus)}, which the model does not have: it has "
                f"{settings['num_hidden_layers']} layers. Was it trained on another model?"
            )
        self.infos: dict[str, TensorInfo] = {}
        self._makers: dict[str, Callable[[], torch.Tensor]] = {}
        for mapped in found:
            self._add(mapped, settings)

    def load(self, digest: hashlib._Hash) -> None:
        digest.update(self._data)

    def tensor(self, name: str) -> torch.Tensor:
        return self._makers[name]()

    def _base_file(self, model: Any) -> GGUFFile:
        """A file as of the model that was trained, with the outputs of each adapted tensor."""
        tensors: dict[str, GGUFTensor] = {}
        for name, tensor in self._file.tensors.items():
            base, ending = name[: -len(_ENDINGS[0])], name[-len(_ENDINGS[0]) :]
            if ending not in _ENDINGS:
                raise AdapterError(
                    f"{self._path}: tensor {name:.200} is no part of a LoRA adapter: only "
                    "matrices can be adapted"
                )
            other = base + _ENDINGS[ending == _ENDINGS[0]]
            if other not in self._file.tensors:
                raise AdapterError(f"{self._path}: tensor {name:.200} lacks its pair {other:.200}")
            if ending == ".lora_b":
                tensors[base] = GGUFTensor(base, _FLOAT32, tensor.shape, 0, 0)
        metadata = dict(self._file.metadata)
        architecture = metadata.get("general.architecture")
        experts = [getattr(module, "config", None) for module in model.modules()]
        counts = [getattr(config, "num_experts", None) for config in experts]
        if any(counts):  # tells Mixtral from Llama; files of adapters do not say
            metadata[f"{architecture}.expert_count"] = max(count for count in counts if count)
        return GGUFFile(self._path, metadata, tensors)

    def _floats(self, name: str) -> torch.Tensor:
        tensor = self._file.tensors[name]
        own = bytearray(self._data[tensor.offset : tensor.offset + tensor.nbytes])
        return dequantize(tensor, torch.frombuffer(own, dtype=torch.uint8))

    def _add(self, mapped: MappedTensor, settings: Mapping[str, Any]) -> None:
        base, transform = mapped.tensor.name, mapped.transform
        a, b = (f"{base}{ending}" for ending in _ENDINGS)
        module = mapped.name.removesuffix(".weight")
        a_shape, b_shape = self._file.tensors[a].shape, self._file.tensors[b].shape
        if isinstance(transform, SplitExperts):
            self._add_experts(module, a, b, transform)
        elif base == "token_embd.weight":
            self._put(f"{module}.lora_embedding_A", a_shape[::-1], lambda: self._floats(a).T)
            self._put(f"{module}.lora_embedding_B", b_shape, lambda: self._floats(b))
        elif isinstance(transform, UnpermuteRope):
            heads = settings[transform.heads]
            self._put(f"{module}.lora_A.weight", a_shape, lambda: self._floats(a))
            self._put(
                f"{module}.lora_B.weight", b_shape, lambda: unpermute_rope(self._floats(b), heads)
            )
        elif transform is None or transform is Stored.AS_VECTOR:
            self._put(f"{module}.lora_A.weight", a_shape, lambda: self._floats(a))
            self._put(f"{module}.lora_B.weight", b_shape, lambda: self._floats(b))
        else:
            raise AdapterError(
                f"{self._path}: tensor {b} adapts a matrix that is stored in another form "
                f"({type(transform).__name__}): convert the adapter from PEFT's format"
            )

    def _add_experts(self, module: str, a: str, b: str, transform: SplitExperts) -> None:
        """Tensors [experts, rank, in] and [experts, out, rank]."""
        a_shape, b_shape = self._file.tensors[a].shape, self._file.tensors[b].shape
        count = a_shape[0]
        if len(a_shape) != 3 or len(b_shape) != 3 or b_shape[0] != count:
            raise AdapterError(f"{self._path}: tensors {a} and {b} are not of the same experts")
        rows = b_shape[1] // len(transform.parts)

        def part_of_b(expert: int, part: int) -> torch.Tensor:
            return self._floats(b)[expert, part * rows : (part + 1) * rows]

        def expert_of_a(expert: int) -> torch.Tensor:
            return self._floats(a)[expert]

        for expert in range(count):
            for index, part in enumerate(transform.parts):
                own = module.replace("{e}", str(expert)).replace("{p}", part)
                self._put(f"{own}.lora_A.weight", a_shape[1:], partial(expert_of_a, expert))
                make = partial(part_of_b, expert, index)
                self._put(f"{own}.lora_B.weight", (rows, b_shape[2]), make)

    def _put(self, name: str, shape: tuple[int, ...], make: Callable[[], torch.Tensor]) -> None:
        self.infos[name] = TensorInfo("F32", tuple(shape), 0, 0)
        self._makers[name] = make


def _read_config(file: GGUFFile) -> AdapterConfig:
    wanted = {"general.type": "adapter", "adapter.type": "lora"}
    for key, value in wanted.items():
        if file.metadata.get(key) != value:
            raise AdapterError(
                f"{file.path}: {key} must be {value!r}, got {file.metadata.get(key)!r:.80}: it is "
                "no LoRA adapter"
            )
    if file.metadata.get("adapter.alora.invocation_tokens"):
        raise AdapterError(f"{file.path}: activated LoRA (adapter.alora) is not supported")
    alpha = file.metadata.get("adapter.lora.alpha")
    if not isinstance(alpha, int | float) or not 0 < alpha < 1e9:
        raise AdapterError(
            f"{file.path}: adapter.lora.alpha must be a number above 0, got {alpha!r:.80}"
        )
    return AdapterConfig(alpha=float(alpha))


def _settings(model: Any, path: Path) -> dict[str, Any]:
    """The sizes that the reversal of a conversion needs."""
    config: Any = getattr(model, "config", None)
    try:
        return {
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
        }
    except AttributeError:
        raise AdapterError(
            f"{path}: GGUF adapters need a model with Penstock's own implementation: use the "
            "adapter in PEFT's format"
        ) from None
