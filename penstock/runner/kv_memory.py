"""The KV cache's memory: one buffer for each place in a page, shared by the groups' layers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from penstock.layers.context import ForwardContext
from penstock.ops.attention import AttentionMetadata
from penstock.protocol.kv import FullAttentionSpec, KVCacheGroup, KVCacheLayout

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
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
        self.layer_names = [group.layer_names for group in layout.groups]
        self.caches = {
            name: self._view(self._buffers[index], group)
            for group in layout.groups
            for index, name in enumerate(group.layer_names)
        }

    def context(
        self,
        groups: Sequence[AttentionMetadata],
        query_starts: torch.Tensor,
        token_slots: torch.Tensor,
    ) -> ForwardContext:
        """What a forward pass over these caches needs to know of its step."""
        attention = {
            name: groups[group] for group, names in enumerate(self.layer_names) for name in names
        }
        return ForwardContext(self.caches, attention, query_starts, token_slots)

    def _view(self, buffer: torch.Tensor, group: KVCacheGroup) -> torch.Tensor:
        """[num_blocks, 2, block_size, num_kv_heads, entry_size], the page's padding left out."""
        spec = group.spec
        assert isinstance(spec, FullAttentionSpec)
        used = group.block_size * spec.bytes_per_token()
        typed = buffer[:, :used].view(TORCH_DTYPES[spec.dtype])
        shape = (2, group.block_size, spec.num_kv_heads, spec.entry_size)
        return typed.as_strided((len(buffer), *shape), (typed.stride(0), *_strides(shape)))


def _zeros(num_blocks: int, page_bytes: int, device: torch.device) -> torch.Tensor:
    """[num_blocks, page_bytes] uint8. On a CPU, pages take no memory until they are written."""
    if device.type == "cpu":  # numpy leaves zeroing to the system, torch writes every page
        memory = np.zeros(num_blocks * page_bytes + CACHE_LINE, dtype=np.uint8)
        start = -memory.ctypes.data % CACHE_LINE  # or every load of a wide vector touches two lines
        whole = memory[start : start + num_blocks * page_bytes]
        return torch.from_numpy(whole.reshape(num_blocks, page_bytes))
    return torch.zeros(num_blocks, page_bytes, dtype=torch.uint8, device=device)


def _strides(shape: tuple[int, ...]) -> list[int]:
    """Of a contiguous tensor."""
    return [math.prod(shape[index + 1 :]) for index in range(len(shape))]
