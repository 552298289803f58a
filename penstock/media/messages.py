"""What the media processes are asked, and what they answer."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.protocol.media import MediaTensor, Modality


class MediaSetup(msgspec.Struct, frozen=True):
    folder: str  # of the checkpoint
    # The files of a checkpoint that has no such folder, by name.
    files: dict[str, str] = {}


class DescribeProcessor(msgspec.Struct, frozen=True, tag=True):
    """Ask for the `ProcessorInfo`."""


class ProcessMedia(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Decode an item, process it, and write its tensors to a file."""

    modality: Modality
    data: bytes  # a file, or pixels if `shape` is given
    places: list[str]  # files: the tensors go to the first one with room for them
    shape: tuple[int, ...] | None = None  # of RGB pixels: [height, width, 3], after [frames]
    kwargs: dict[str, Any] = {}  # of the processor
    io_kwargs: dict[str, Any] = {}  # of decoding
    facts: dict[str, Any] = {}  # about frames that are given as pixels
    grid: list[int] = []  # of a video whose embeddings are given: only its text is asked for
    max_pixels: int


class ProcessorInfo(msgspec.Struct, frozen=True):
    image_token: str  # in a prompt: where an image goes
    image_token_id: int
    row_token_id: int  # the placeholder of one of its embeddings; often the same
    video_token: str | None = None
    video_token_id: int | None = None  # None: a text, or there is no video
    video_row_token_id: int | None = None
    after_media: str = ""  # a text that follows the last item, and begins the prompt's own text
    prompt_end: str = ""  # a text that ends prompts with media
    merge: int = 0  # squares of merge x merge patches are a row; 0: items have no grid of patches


class ProcessedMedia(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An item's tensors and its text in the prompt, or what is wrong with it."""

    error: str | None = None
    path: str | None = None  # of the file with the tensors; None: no place has room
    text: str = ""  # each run of placeholders is one placeholder here
    runs: list[int] = []  # placeholders in each run
    tensors: list[MediaTensor] = []
    facts: dict[str, list[int]] = {}


MediaRequest = DescribeProcessor | ProcessMedia
