"""An encoder layer in one call of the C++ library, with its attention and matmul kernels."""

from __future__ import annotations

import ctypes

import torch
from torch import nn

from penstock.layers.linear import Linear
from penstock.layers.lora import is_hooked
from penstock.layers.native import NativeMethod
from penstock.layers.norm import LayerNorm
from penstock.layers.sublayers import Angles
from penstock.models.encoder import EncoderParts, FusableLayer
from penstock.ops.cpu import library
from penstock.ops.cpu.ops import ALL_POSITIONS, packed_step_of

_library = library.loaded()
_encoder_layer = _library.penstock_encoder_layer

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")  # `Activation` in csrc/kernels.hpp


def fuse_encoder_layers(model: nn.Module) -> None:
    """Run each layer that the library supports in one call. The weights must be loaded."""
    steps = _PackedSteps()
    for module in model.modules():
        if isinstance(module, FusableLayer):
            parts = module.parts()
            if parts is not None and parts.activation in ACTIVATIONS and _are_packed(parts):
                module.fused = NativeEncoderLayer(parts, steps)


def _are_packed(parts: EncoderParts) -> bool:
    """Whether the library has all of the weights."""
    return all(
        isinstance(linear.method, NativeMethod)
        and linear.build.tp.size == 1
        and linear.native.linear is not None
        and linear.native.linear.in_features == linear.in_features
        for linear in parts.linears
    )


class _PackedSteps:
    """The current step as the library takes it, made once for all layers with the same angles."""

    def __init__(self) -> None:
        self._starts: torch.Tensor | None = None
        self._angles: Angles | None = None
        self._step = library.StepStruct()

    def pointer(self, starts: torch.Tensor, rows: int, angles: Angles | None) -> int:
        if starts is not self._starts or angles is not self._angles or rows != self._step.rows:
            self._starts, self._angles = starts, angles  # keeps alive what the step points to
            self._step = packed_step_of(starts, rows, angles)
        return ctypes.addressof(self._step)


class NativeEncoderLayer:
    """Calls the library for a layer whose weights are loaded."""

    def __init__(self, parts: EncoderParts, steps: _PackedSteps) -> None:
        self._parts = parts
        self._steps = steps
        qkv, *_, down = parts.linears
        self._struct = library.EncoderLayerStruct(
            *[_norm(norm) for norm in parts.norms],
            *[_weights(linear) for linear in parts.linears],
            hidden=qkv.in_features,
            num_heads=parts.num_heads,
            head_dim=parts.head_dim,
            intermediate=down.in_features,
            reach=ALL_POSITIONS if parts.window is None else parts.window,
            activation=ACTIVATIONS.index(parts.activation),
            is_gated=parts.is_gated,
            norm_first=parts.norm_first,
            scale=parts.scale,
        )
        self._pointer = ctypes.addressof(self._struct)

    def applies(self) -> bool:
        """Whether no adapter hooks into the layer's parts now."""
        return not any(is_hooked(linear) for linear in self._parts.linears)

    def __call__(
        self, x: torch.Tensor, starts: torch.Tensor, angles: Angles | None
    ) -> torch.Tensor:
        """Like the layer's forward. x [n, hidden] is changed in place."""
        assert x.shape[1:] == (self._struct.hidden,), f"{list(x.shape)}"
        assert x.dtype == torch.float32, f"{x.dtype} activations"
        assert x.is_contiguous(), "rows lie one behind the other"
        _encoder_layer(self._pointer, self._steps.pointer(starts, len(x), angles), x.data_ptr())
        return x


def _norm(norm: LayerNorm | None) -> library.LayerNormStruct:
    if norm is None:
        return library.LayerNormStruct(None, None, 0.0)
    bias = None if norm.bias is None else norm.bias.data_ptr()
    return library.LayerNormStruct(norm.weight.data_ptr(), bias, norm.eps)


def _weights(linear: Linear) -> library.WeightsStruct:
    packed = linear.native.linear
    assert packed is not None, "weights are loaded first"
    return packed.weights(linear.bias)
