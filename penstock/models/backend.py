"""Decides which ops a worker's model uses, and how its layers store their weights."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from penstock.config import EngineConfig
from penstock.config.quantization import find_quantization_config
from penstock.layers.gguf import GgufMethod
from penstock.layers.quantization import DenseMethod, LinearMethod
from penstock.loading.gguf.dequant import FLOAT_DTYPES
from penstock.loading.gguf.file import GGUFFile
from penstock.models.plugins import find_plugins, plugin_ops
from penstock.ops.cpu import library
from penstock.ops.gguf_recode import RECODINGS
from penstock.ops.registry import Ops
from penstock.platforms.platform import Platform
from penstock.protocol.errors import ConfigError

if TYPE_CHECKING:
    from penstock.layers.quantized.linear import Finish
    from penstock.layers.quantized.plan import Quantization


@dataclass(frozen=True)
class ModelBackend:
    ops: Ops
    linear_method: LinearMethod  # of unquantized layers
    dtype: torch.dtype  # of activations
    native_types: Collection[str] = ()  # GGUF types that layers keep without dequantizing
    native_layers: bool = False  # whether whole layers run in the C++ library
    kv_dtype: str | None = None  # default type of the KV cache; None: the model's
    quantization: Quantization | None = None  # which layers are quantized, and how
    take_over: Finish | None = None  # quantized layers with a device-specific implementation
    tower_method: LinearMethod = field(default_factory=DenseMethod)  # of vision towers

    def finish(self, model: nn.Module) -> None:
        """Called after the weights are loaded."""
        if self.native_layers:
            # Imported here: both need the library.
            from penstock.models.native_decoder import fuse_layers
            from penstock.models.native_encoder import fuse_encoder_layers

            fuse_layers(model)
            fuse_encoder_layers(model)


def start_threads(native: ctypes.CDLL, count: int) -> None:
    """Set the library's number of threads. Raises if the system does not provide them."""
    started = native.penstock_set_threads(count)
    if started < count:
        native.penstock_set_threads(1)
        raise ConfigError(
            f"cpu_threads={count}: the system gives this process no more than {started}; set "
            "cpu_threads to fewer, or raise the process's limits on threads and memory"
        )


def choose_backend(
    config: EngineConfig,
    platform: Platform,
    dtype: torch.dtype,
    gguf: GGUFFile | None,
    model_config: Mapping[str, Any],
) -> ModelBackend:
    """The C++ library on a CPU that has it, Triton on a GPU, otherwise torch.

    Sets the number of threads of each. `gguf` is the file, if the weights come from one.
    """
    if config.load.load_format == "dummy":
        gguf = None
    num_ranks = config.parallel.tensor_parallel_size
    quantization = None
    if config.load.quantization is not None or find_quantization_config(model_config) is not None:
        from penstock.layers.quantized.checkpoints import choose_quantization  # few models need it

        quantization = choose_quantization(model_config, config.load.quantization, num_ranks)
    device = platform.device.type
    native = library.load() if device == "cpu" and config.device.cpu_backend == "auto" else None
    if device == "cuda":
        from penstock.ops.triton.cache import use_checked_cache  # needs Triton

        use_checked_cache()
        if gguf is not None and config.load.gguf_compute == "auto" and quantization is None:
            return _gguf_on_gpu(gguf, dtype)
    if native is None:
        return ModelBackend(_ops(device), DenseMethod(), dtype, quantization=quantization)
    start_threads(native, platform.cpu_threads)
    torch.set_num_threads(1)  # two thread pools would compete for the cores
    # Imported here: they need the library.
    from penstock.layers.native import NativeMethod
    from penstock.ops.cpu.dtypes import NATIVE_TYPES

    types = NATIVE_TYPES if config.load.gguf_compute == "auto" else ()
    # The library computes in float32. A requested 16-bit type applies to the weights.
    int8 = config.load.quantization == "int8"
    quantization = None if int8 else quantization  # the library does this one itself
    float_dtype = None if dtype == torch.float32 else dtype
    method = NativeMethod(int8, float_dtype)
    # With weights of 8 bits and less, a 16-bit KV cache loses no visible quality and halves what
    # attention reads. Measured in docs/benchmarks.md.
    in_blocks = method.int8 or (gguf is not None and bool(types))
    take_over = None
    if quantization is not None:
        from penstock.layers.quantized.native import NativeFinish

        take_over = NativeFinish(method)
    return ModelBackend(
        _ops("cpu-native"),
        method,
        torch.float32,
        types,
        native_layers=True,
        kv_dtype="float16" if in_blocks else None,
        quantization=quantization,
        take_over=take_over,
        tower_method=NativeMethod(float_dtype=float_dtype),
    )


def _gguf_on_gpu(gguf: GGUFFile, dtype: torch.dtype) -> ModelBackend:
    """Matrices stay in quantization blocks. Experts do so only if all of them are in blocks."""
    from penstock.ops.triton.gguf_layout import LAYOUTS  # needs Triton

    experts = {tensor.type.name for tensor in gguf.tensors.values() if "_exps." in tensor.name}
    recoded = {name for name, recoding in RECODINGS.items() if recoding.target in LAYOUTS}
    method = GgufMethod(expert_blocks=experts <= LAYOUTS.keys() | recoded)
    return ModelBackend(_ops("cuda"), method, dtype, native_types=(*LAYOUTS, *FLOAT_DTYPES))


def _ops(backend: str) -> Ops:
    return Ops(backend, plugin_ops(find_plugins(), backend))
