"""Media of a request: where its content is, and what workers do with it."""

from __future__ import annotations

from typing import Literal

import msgspec

Modality = Literal["image", "video"]
EMBEDS = "embeds"  # name of a tensor with an item's embeddings, which need no encoder


class MediaTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a processor's output, within a file of shared memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # byte


class MediaItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An image or a video of a prompt, as the model's processor prepared it.

    The client's process owns the file and removes it after the request. `hash` covers the content
    and how it was processed.
    """

    modality: Modality
    hash: bytes
    offset: int  # of its first token in the prompt
    length: int  # tokens, those around and between the placeholders included
    runs: list[tuple[int, int]]  # of placeholders: distance from `offset`, and number
    path: str
    tensors: list[MediaTensor]
    facts: dict[str, list[int]] = {}  # small integers of the processor's output, by name

    @property
    def end(self) -> int:
        return self.offset + self.length

    @property
    def num_rows(self) -> int:
        """Rows of the encoder's output: one for each placeholder."""
        return sum(count for _, count in self.runs)


class EncodeMedia(msgspec.Struct, frozen=True, tag=True):
    """Compute an item's embeddings before the step, and keep them."""

    item: MediaItem
    adapter_slot: int | None = None  # of an adapter that changes the tower
    content: bytes | None = None  # of the item's file, for a rank on another machine


class DropMedia(msgspec.Struct, frozen=True, tag=True):
    """Free the embeddings of an item. Steps launched earlier have read them."""

    hash: bytes


MediaJob = EncodeMedia | DropMedia
