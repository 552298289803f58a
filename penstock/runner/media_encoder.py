"""MediaEncoder: computes the embeddings of media, whose items ranks divide among them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from penstock.models.vision import MediaInputs, VisionModel
from penstock.protocol.media import EMBEDS, EncodeMedia
from penstock.runner.encoder_graphs import EncoderGraphs
from penstock.runner.graphs import GraphPool


class MediaEncoder:
    """All ranks of the first pipeline stage have one, and get all embeddings."""

    def __init__(
        self, model: VisionModel, device: torch.device, dtype: torch.dtype, capture_graphs: bool
    ) -> None:
        self._width = model.media_width
        self._device = device
        self._dtype = dtype
        self._ranks = model.item_ranks
        self._encode = model.tower.encode
        if device.type == "cuda":
            self._encode = EncoderGraphs(model.tower, GraphPool(capture_graphs)).encode

    def encode(self, jobs: Sequence[EncodeMedia]) -> list[torch.Tensor]:
        """The rows of each item, [num_rows, media_width]."""
        rows: dict[bytes, torch.Tensor] = {}
        for job in jobs:
            if _is_embeds(job):
                embeds = read_inputs(job, self._device).tensors[EMBEDS]
                rows[job.item.hash] = embeds.to(self._dtype)
        raw = [job for job in jobs if not _is_embeds(job)]
        shares = divide([job.item.num_rows for job in raw], self._ranks.size)
        own = self._compute([raw[index] for index in shares[self._ranks.rank]])
        for rank, share in enumerate(shares):
            sizes = [raw[index].item.num_rows for index in share]
            given = own
            if rank != self._ranks.rank:
                given = own.new_empty((sum(sizes), self._width))
            if share:
                self._ranks.broadcast(given, rank)
            for index, part in zip(share, torch.split(given, sizes), strict=True):
                rows[raw[index].item.hash] = part.clone()  # a view would keep all of them
        return [rows[job.item.hash] for job in jobs]

    def _compute(self, jobs: Sequence[EncodeMedia]) -> torch.Tensor:
        """The rows of these items together, by the tower of this rank."""
        none = torch.empty((0, self._width), dtype=self._dtype, device=self._device)
        if not jobs:
            return none
        encoded = self._encode([read_inputs(job, self._device) for job in jobs])
        for job, rows in zip(jobs, encoded, strict=True):
            if rows.shape != (job.item.num_rows, self._width):
                raise RuntimeError(
                    f"the vision tower gives {tuple(rows.shape)} rows for {job.item.num_rows} "
                    f"placeholders of width {self._width}"
                )
        return torch.cat(encoded)


def divide(sizes: Sequence[int], num_ranks: int) -> list[list[int]]:
    """The indexes of each rank's items: the largest first, to the rank that has the least."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += sizes[index]
    return [sorted(share) for share in shares]


def read_inputs(job: EncodeMedia, device: torch.device) -> MediaInputs:
    """An item's tensors, from the job or from shared memory."""
    item, content = job.item, job.content
    tensors = {}
    source: bytes | mmap.mmap
    if content is not None:
        source = content
    else:
        with Path(item.path).open("rb") as file:
            source = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    for each in item.tensors:
        count = int(np.prod(each.shape))
        array = np.frombuffer(source, dtype=each.dtype, count=count, offset=each.start)
        # A copy: the file may be removed, and torch does not take memory that is read-only.
        tensors[each.name] = torch.from_numpy(array.reshape(each.shape).copy()).to(device)
    return MediaInputs(item.modality, tensors, item.facts)


def _is_embeds(job: EncodeMedia) -> bool:
    return any(tensor.name == EMBEDS for tensor in job.item.tensors)
