"""A decoder layer in one call of the C++ library, for the plain layer of most models.

The library runs the same kernels as the layer's parts, in the same order, so the result is the same
bit for bit. It saves the returns to Python between them.
"""

from __future__ import annotations

import ctypes

import torch
from torch import nn

from penstock.layers.context import current_context
from penstock.layers.linear import Linear
from penstock.layers.lora import LinearSlots
from penstock.layers.native import NativeMethod
from penstock.layers.norm import RMSNorm
from penstock.layers.sublayers import Angles, GatedMLP, RotaryAttention, Stream
from penstock.models.decoder import DecoderLayer
from penstock.ops.attention import AttentionMetadata
from penstock.ops.cpu import library, lora
from penstock.ops.cpu.ops import cache_of, step_of
from penstock.ops.lora import AdapterStep

_library = library.loaded()
_decoder_layer = _library.penstock_decoder_layer


def fuse_layers(model: nn.Module) -> None:
    """Run each layer that the library supports in one call. The weights must be loaded."""
    steps = _Steps()
    for module in model.modules():
        if isinstance(module, DecoderLayer) and _can_fuse(module):
            module.fused = NativeDecoderLayer(module, steps)


def _can_fuse(layer: DecoderLayer) -> bool:
    if type(layer) is not DecoderLayer or type(layer.self_attn) is not RotaryAttention:
        return False
    rotary, q_norm = layer.self_attn.rotary, layer.self_attn.q_norm
    return (
        type(layer.input_layernorm) is RMSNorm
        and type(layer.post_attention_layernorm) is RMSNorm
        and rotary is not None
        and not rotary.interleaved
        and (q_norm is None or type(q_norm) is RMSNorm)
        and type(layer.mlp) is GatedMLP
        and layer.self_attn.attention.kind == "causal"
        and not layer.self_attn.attention.extras
        and all(
            isinstance(linear.method, NativeMethod) and linear.build.tp.size == 1
            for linear in _linears(layer)
        )
    )


def _linears(layer: DecoderLayer) -> list[Linear]:
    attention, mlp = layer.self_attn, layer.mlp
    assert isinstance(attention, RotaryAttention)
    assert isinstance(mlp, GatedMLP)
    return [attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj]


class _Steps:
    """The current step as the library takes it, made once for all layers of a KV group."""

    def __init__(self) -> None:
        self._metadata: AttentionMetadata | None = None
        self._angles: Angles | None = None
        self._step = library.StepStruct()
        self._adapters: AdapterStep | None = None
        self._adapter_step = library.AdapterStepStruct()

    def pointer(self, metadata: AttentionMetadata, angles: Angles) -> int:
        if metadata is not self._metadata or angles is not self._angles:
            self._metadata, self._angles = metadata, angles  # keeps alive what the step points to
            self._step = step_of(metadata, *angles)
            cos, sin = angles
            assert cos.stride() == sin.stride(), "angles lie alike"
            assert cos.dtype == sin.dtype == torch.float32, f"{cos.dtype} angles"
        return ctypes.addressof(self._step)

    def adapters(self, adapters: AdapterStep) -> int:
        """The same for the rows by adapter slot."""
        if adapters is not self._adapters:
            self._adapters = adapters
            self._adapter_step = lora.step_of(adapters)
        return ctypes.addressof(self._adapter_step)


class NativeDecoderLayer:
    """Calls the library for a layer whose weights are loaded."""

    def __init__(self, layer: DecoderLayer, steps: _Steps) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        assert isinstance(attention, RotaryAttention)
        assert isinstance(mlp, GatedMLP)
        self._name = attention.attention.name
        self._linears = _linears(layer)
        self._steps = steps
        self._cache: torch.Tensor | None = None
        self._cache_struct = library.Cache()
        q_norm, k_norm = attention.q_norm, attention.k_norm
        assert isinstance(q_norm, RMSNorm | None)
        assert isinstance(k_norm, RMSNorm | None)
        weights = [_weights(linear) for linear in self._linears]
        self._struct = library.DecoderLayerStruct(
            layer.input_layernorm.weight.data_ptr(),
            layer.post_attention_layernorm.weight.data_ptr(),
            q_norm.weight.data_ptr() if q_norm is not None else None,
            k_norm.weight.data_ptr() if k_norm is not None else None,
            *weights,
            hidden=attention.qkv_proj.in_features,
            num_heads=attention.num_heads,
            intermediate=mlp.down_proj.in_features,
            window=attention.attention.window or 0,
            eps=layer.input_layernorm.eps,
            qk_eps=q_norm.eps if q_norm is not None else 0.0,
            scale=attention.attention.scale,
        )
        self._pointer = ctypes.addressof(self._struct)
        self._lora: library.DecoderLora | None = None  # made for the first step that needs it

    def applies(self) -> bool:
        """Whether only LoRA adapters hook into the layer's parts, and attention is causal."""
        return not current_context().spans and all(
            linear.adapter is None or isinstance(linear.adapter, LinearSlots)
            for linear in self._linears
        )

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, angles: Angles) -> Stream:
        """Like the layer's forward. x and residual [n, hidden] are changed in place."""
        context = current_context()
        cache = context.caches[self._name]
        if cache is not self._cache:
            self._cache, self._cache_struct = cache, cache_of(cache)
        has_residual = residual is not None
        if residual is None:  # the first layer; later ones get its result
            rows = context.attention[self._name].slot_mapping.shape[0]
            assert x.shape == (rows, self._struct.hidden), f"{list(x.shape)}, {rows} rows"
            assert x.dtype == torch.float32, f"{x.dtype} activations"
            assert x.is_contiguous(), "rows lie one behind the other"
            residual = torch.empty_like(x)
        adapters = context.adapters
        if adapters is not None and self._lora is None:
            self._lora = _lora(self._linears)
        _decoder_layer(
            self._pointer,
            ctypes.addressof(self._cache_struct),
            self._steps.pointer(context.attention[self._name], angles),
            x.data_ptr(),
            residual.data_ptr(),
            has_residual,
            None if adapters is None or self._lora is None else ctypes.addressof(self._lora),
            None if adapters is None else self._steps.adapters(adapters),
        )
        return x, residual


def _weights(linear: Linear) -> library.WeightsStruct:
    packed = linear.native.linear
    assert packed is not None, "weights are loaded first"
    assert packed.in_features == linear.in_features, "columns are filled up: not for whole layers"
    return packed.weights(linear.bias)


def _lora(linears: list[Linear]) -> library.DecoderLora:
    slots = []
    for linear in linears:
        assert isinstance(linear.adapter, LinearSlots), "every layer has adapter slots, or none"
        assert isinstance(linear.adapter.slots, lora.NativeLoraSlots), "the slots are the library's"
        slots.append(ctypes.addressof(linear.adapter.slots.struct))
    return library.DecoderLora(*slots)
