"""Allocates the KV cache: one buffer per layer index, shared by all groups, and per draft layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from penstock.layers.context import ForwardContext
from penstock.ops.attention import AttentionMetadata
from penstock.ops.lora import AdapterStep
from penstock.protocol.kv import (
    DTYPE_BYTES,
    AttentionSpec,
    KVCacheLayout,
    KVCacheSpec,
    LatentSpec,
    RecurrentSpec,
)

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "float8_e4m3": torch.float8_e4m3fn,
}


CACHE_LINE = 64


class KVMemory:
    """Allocates a layout. The i-th layers of all groups are views of the i-th buffer."""

    def __init__(self, layout: KVCacheLayout, device: torch.device) -> None:
        self.layout = layout
        self._buffers = [
            _zeros(layout.num_blocks, layout.page_bytes, device)
            for _ in range(layout.layers_per_page)
        ]
        self.second_segments: torch.Tensor | None = None  # a column of the request tables
        self.layer_names = [list(group.layer_names) for group in layout.groups]
        self.caches: dict[str, torch.Tensor] = {}
        self.states: dict[str, tuple[torch.Tensor, ...]] = {}
        self._state_block_sizes: dict[str, int] = {}
        self._draft_inputs: dict[str, tuple[torch.Tensor, ...]] = {}  # of the last step
        for group in layout.groups:
            for name, buffer in zip(group.layer_names, self._buffers, strict=False):
                if isinstance(group.spec, RecurrentSpec):
                    self.states[name] = _view_state(buffer, group.spec)
                    self._state_block_sizes[name] = group.block_size
                    self._draft_inputs[name] = _rows(group.spec, layout.num_draft_rows, device)
                else:
                    self.caches[name] = _view_tokens(buffer, group.spec, group.block_size)
        for name, spec in layout.draft_layers.items():
            block_size = layout.groups[layout.draft_group].block_size
            buffer = _zeros(layout.num_blocks, spec.block_bytes(block_size), device)
            self.caches[name] = _view_tokens(buffer, spec, block_size)
            self.layer_names[layout.draft_group].append(name)

    def group_of(self, layer_name: str) -> int:
        """The index of the group whose block table the layer uses."""
        return next(i for i, names in enumerate(self.layer_names) if layer_name in names)

    def context(
        self,
        groups: Sequence[AttentionMetadata],
        query_starts: torch.Tensor,
        token_slots: torch.Tensor,
        adapters: AdapterStep | None = None,
    ) -> ForwardContext:
        """The context of a forward pass over these caches."""
        attention = {
            name: groups[group] for group, names in enumerate(self.layer_names) for name in names
        }
        return ForwardContext(
            self.caches,
            attention,
            query_starts,
            token_slots,
            self.states,
            self._state_block_sizes,
            self._draft_inputs,
            second_segments=self.second_segments,
            adapters=adapters,
        )


def make_states(
    spec: RecurrentSpec, num_states: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Room for states outside of the cache, part by part: [num_states, *shape] each."""
    return _view_state(_zeros(num_states, spec.block_bytes(1), device), spec)


def _view_tokens(buffer: torch.Tensor, spec: KVCacheSpec, block_size: int) -> torch.Tensor:
    """A layer's KV blocks, without the padding of the page.

    Keys and values: [num_blocks, 2, block_size, num_kv_heads, entry_size]. Latent vectors:
    [num_blocks, block_size, entry_size].
    """
    assert isinstance(spec, AttentionSpec | LatentSpec)
    shape: tuple[int, ...] = (block_size, spec.entry_size)
    if isinstance(spec, AttentionSpec):
        shape = (2, block_size, spec.num_kv_heads, spec.entry_size)
    return _view(buffer, 0, shape, spec.dtype)


def _view_state(buffer: torch.Tensor, spec: RecurrentSpec) -> tuple[torch.Tensor, ...]:
    """The parts of a layer's recurrent state: [num_blocks, *shape] each."""
    parts = zip(spec.offsets, spec.shapes, spec.dtypes, strict=False)
    return tuple(_view(buffer, offset, shape, dtype) for offset, shape, dtype in parts)


def _rows(spec: RecurrentSpec, num_rows: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Room for the inputs of some rows: [num_rows, size] each."""
    return tuple(
        _zeros(num_rows, size * DTYPE_BYTES[dtype], device).view(TORCH_DTYPES[dtype])
        for size, dtype in spec.inputs
    )


def _view(buffer: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """A view of each page from byte `offset` on: [num_blocks, *shape]."""
    used = math.prod(shape) * DTYPE_BYTES[dtype]
    typed = buffer[:, offset : offset + used].view(TORCH_DTYPES[dtype])
    return typed.as_strided((len(buffer), *shape), (typed.stride(0), *_strides(shape)))


def _zeros(num_blocks: int, page_bytes: int, device: torch.device) -> torch.Tensor:
    """[num_blocks, page_bytes] uint8. On a CPU, pages take no memory until they are written."""
    if device.type == "cpu":  # numpy leaves zeroing to the OS; torch writes every page
        memory = np.zeros(num_blocks * page_bytes + CACHE_LINE, dtype=np.uint8)
        start = -memory.ctypes.data % CACHE_LINE  # unaligned wide loads would touch two cache lines
        whole = memory[start : start + num_blocks * page_bytes]
        return torch.from_numpy(whole.reshape(num_blocks, page_bytes))
    return torch.zeros(num_blocks, page_bytes, dtype=torch.uint8, device=device)


def _strides(shape: tuple[int, ...]) -> list[int]:
    """The strides of a contiguous tensor."""
    return [math.prod(shape[index + 1 :]) for index in range(len(shape))]
