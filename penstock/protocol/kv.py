"""How a model's KV cache is laid out: specs by layer, groups of layers, pages of one size."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, TypeAlias

import msgspec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3": 1}
INT8_SCALE_BYTES = 4  # each head of a token has a scale of its own, a float32, behind its numbers
STATE_ALIGNMENT = 64  # bytes: where each part of a recurrent state begins
UNBOUNDED = 2**62  # tokens: more than there can be


class KVCacheSpec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What one layer keeps of a request. `kvcache/groups.py` says which of it, and for how long."""

    def bytes_per_token(self) -> int:
        """0 for what has one size, however many tokens there are."""
        raise NotImplementedError

    def block_bytes(self, block_size: int) -> int:
        """What one block of the layer holds, padding aside."""
        return block_size * self.bytes_per_token()


class AttentionSpec(KVCacheSpec, frozen=True, kw_only=True, tag=True):
    """Keys and values by token and head. Subclasses say of which tokens."""

    num_kv_heads: int  # on one rank
    head_dim: int
    dtype: str  # one of DTYPE_BYTES

    @property
    def entry_size(self) -> int:
        """Elements that a head's key, or value, of one token takes."""
        return self.head_dim + (INT8_SCALE_BYTES if self.dtype == "int8" else 0)

    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.entry_size * DTYPE_BYTES[self.dtype]


class FullAttentionSpec(AttentionSpec, frozen=True, kw_only=True, tag=True):
    """Keys and values of every token."""


class SlidingWindowSpec(AttentionSpec, frozen=True, kw_only=True, tag=True):
    """Keys and values of the last `window` tokens, the current one among them."""

    window: int


class ChunkedLocalSpec(AttentionSpec, frozen=True, kw_only=True, tag=True):
    """Keys and values of the tokens since the last multiple of `chunk`."""

    chunk: int


class CrossAttentionSpec(AttentionSpec, frozen=True, kw_only=True, tag=True):
    """Keys and values of another sequence, of `max_tokens` at most, the same for all tokens."""

    max_tokens: int


class LatentSpec(KVCacheSpec, frozen=True, kw_only=True, tag=True):
    """One vector of every token, from which the keys and values of all heads are made."""

    entry_size: int  # numbers a token: the compressed ones and the rotated part of the key
    dtype: str

    def bytes_per_token(self) -> int:
        return self.entry_size * DTYPE_BYTES[self.dtype]


class RecurrentSpec(KVCacheSpec, frozen=True, kw_only=True, tag=True):
    """A state of fixed size that stands for all tokens so far, in parts of these shapes."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]  # one a shape
    # What a token brings, part by part: how many numbers, and their dtype. Those of drafts are kept
    # until it is known which of them hold.
    inputs: tuple[tuple[int, str], ...] = ()

    @property
    def offsets(self) -> list[int]:
        """Where each part begins in a page, and where the last one ends."""
        offsets = [0]
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            end = offsets[-1] + math.prod(shape) * DTYPE_BYTES[dtype]
            offsets.append(-(-end // STATE_ALIGNMENT) * STATE_ALIGNMENT)
        return offsets

    @property
    def input_bytes(self) -> int:
        return sum(size * DTYPE_BYTES[dtype] for size, dtype in self.inputs)

    def bytes_per_token(self) -> int:
        return 0

    def block_bytes(self, block_size: int) -> int:
        return self.offsets[-1]


# Code takes any KVCacheSpec; a decoder must be told which ones there are, as a union.
if TYPE_CHECKING:
    AnyKVCacheSpec: TypeAlias = KVCacheSpec
else:
    AnyKVCacheSpec = (
        FullAttentionSpec
        | SlidingWindowSpec
        | ChunkedLocalSpec
        | CrossAttentionSpec
        | LatentSpec
        | RecurrentSpec
    )


class KVCacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of one spec that share a block table."""

    spec: AnyKVCacheSpec
    block_size: int  # tokens in a block; of a recurrent state: tokens between two checkpoints
    layer_names: list[str]


class KVCacheLayout(msgspec.Struct, frozen=True, kw_only=True):
    """All groups and the one pool of pages that serves them.

    Every block of every group has the same size in bytes: `page_bytes` for each of at most
    `layers_per_page` layers.

    Layers of a drafter need no group of their own. They use the block table of a group that keeps
    all tokens, with buffers beside the pages.
    """

    groups: list[KVCacheGroup]
    num_blocks: int  # block 0, the null block, included
    page_bytes: int  # one layer's share of a block
    max_step_tokens: int = UNBOUNDED  # that a request gets in one step, at most
    draft_layers: dict[str, AnyKVCacheSpec] = {}  # by name; those in `groups` are not among them
    draft_group: int = 0  # index of the group whose block table the draft layers use
    num_draft_rows: int = 0  # of a step: those of requests with drafts, at most
    # Steps whose drafts are kept: the last one, and copies of those in flight on a pipeline stage,
    # which learns what was accepted when they are collected.
    num_draft_steps: int = 1

    def of_layers(self, names: Collection[str]) -> KVCacheLayout:
        """This layout with only some of the layers: a pipeline stage's. All groups stay.

        Draft layers are named like others.
        """
        groups = [
            msgspec.structs.replace(
                group, layer_names=[name for name in group.layer_names if name in names]
            )
            for group in self.groups
        ]
        draft_layers = {name: spec for name, spec in self.draft_layers.items() if name in names}
        return msgspec.structs.replace(self, groups=groups, draft_layers=draft_layers)

    @property
    def is_recurrent(self) -> bool:
        """Whether some layer keeps a state, which cannot go back to an earlier token."""
        return any(isinstance(group.spec, RecurrentSpec) for group in self.groups)

    @property
    def layers_per_page(self) -> int:
        return max((len(group.layer_names) for group in self.groups), default=0)

    @property
    def block_bytes(self) -> int:
        """What a block takes in all buffers: its pages, and its share of the draft layers'."""
        num_bytes = self.page_bytes * self.layers_per_page
        for spec in self.draft_layers.values():
            num_bytes += spec.block_bytes(self.groups[self.draft_group].block_size)
        return num_bytes

    @property
    def draft_input_bytes(self) -> int:
        """What recurrent layers keep of the drafts of steps in flight."""
        return (
            self.num_draft_rows
            * self.num_draft_steps
            * sum(
                len(group.layer_names) * group.spec.input_bytes
                for group in self.groups
                if isinstance(group.spec, RecurrentSpec)
            )
        )

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.block_bytes + self.draft_input_bytes
