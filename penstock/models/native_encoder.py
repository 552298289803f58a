"""An encoder layer in one call of the C++ library, with its attention and matmul kernels."""

from __future__ import annotations

import ctypes

import torch
from torch import nn

from penstock.layers.context import current_context
from penstock.layers.linear import Linear
from penstock.layers.lora import is_hooked
from penstock.layers.native import NativeMethod
from penstock.layers.norm import LayerNorm
from penstock.layers.sublayers import Angles, RotaryAttention
from penstock.models.encoder import EncoderLayer
from penstock.ops.cpu import library
from penstock.ops.cpu.ops import ALL_POSITIONS, packed_step_of

_library = library.loaded()
_encoder_layer = _library.penstock_encoder_layer

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")  # `Activation` in csrc/kernels.hpp


def fuse_encoder_layers(model: nn.Module) -> None:
    """Run each layer that the library supports in one call. The weights must be loaded."""
    steps = _PackedSteps()
    for module in model.modules():
        if isinstance(module, EncoderLayer) and _can_fuse(module):
            module.fused = NativeEncoderLayer(module, steps)


def _can_fuse(layer: EncoderLayer) -> bool:
    attention = layer.self_attn
    if type(layer) is not EncoderLayer or type(attention) is not RotaryAttention:
        return False
    return (
        attention.q_norm is None
        and attention.attention.kind == "bidirectional"
        and layer.mlp.activation in ACTIVATIONS
        and (attention.rotary is None or not attention.rotary.interleaved)
        and attention.num_heads == attention.num_kv_heads
        and all(
            isinstance(linear.method, NativeMethod)
            and linear.build.tp.size == 1
            and linear.native.linear is not None
            and linear.native.linear.in_features == linear.in_features
            for linear in _linears(layer)
        )
    )


def _linears(layer: EncoderLayer) -> list[Linear]:
    attention, mlp = layer.self_attn, layer.mlp
    return [attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj]


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

    def __init__(self, layer: EncoderLayer, steps: _PackedSteps) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._linears = _linears(layer)
        self._steps = steps
        self._struct = library.EncoderLayerStruct(
            _norm(layer.post_attention_layernorm),
            _norm(layer.post_mlp_layernorm),
            *[_weights(linear) for linear in self._linears],
            hidden=attention.qkv_proj.in_features,
            num_heads=attention.num_heads,
            head_dim=attention.head_dim,
            intermediate=mlp.down_proj.in_features,
            reach=ALL_POSITIONS
            if attention.attention.window is None
            else attention.attention.window,
            activation=ACTIVATIONS.index(mlp.activation),
            is_gated=mlp.is_gated,
            norm_first=layer.norm_first,
            scale=attention.attention.scale,
        )
        self._pointer = ctypes.addressof(self._struct)

    def applies(self) -> bool:
        """Whether no adapter hooks into the layer's parts now."""
        return not any(is_hooked(linear) for linear in self._linears)

    def __call__(self, x: torch.Tensor, angles: Angles | None) -> torch.Tensor:
        """Like the layer's forward. x [n, hidden] is changed in place."""
        assert x.shape[1:] == (self._struct.hidden,), f"{list(x.shape)}"
        assert x.dtype == torch.float32, f"{x.dtype} activations"
        assert x.is_contiguous(), "rows lie one behind the other"
        starts = current_context().query_starts
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
