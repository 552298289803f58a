"""MediaStore: keeps the embeddings of media, and finds those that the rows of a step need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch

from penstock.layers.context import MediaRows, adapter_context
from penstock.models.vision import Positions, VisionModel
from penstock.ops.attention import SpanRows
from penstock.ops.lora import AdapterStep, adapter_step
from penstock.protocol.media import DropMedia, EncodeMedia, MediaJob
from penstock.protocol.step import NewRequest
from penstock.runner.forward import ForwardInputs
from penstock.runner.layout import StepLayout
from penstock.runner.media_encoder import MediaEncoder
from penstock.runner.sampling_tables import to_device
from penstock.runner.tables import IntArray, RequestTables


class _Prompt:
    """What a request's media do to its prompt."""

    def __init__(self, request: NewRequest, positions: Positions | None) -> None:
        self.items = request.media
        self.spans = request.spans
        self.num_tokens = request.num_prompt_tokens
        self.positions = positions  # rotary positions [3, num_tokens]; None without M-RoPE
        # Output goes on after the last token. The times of a video may be beyond that.
        self.delta = 0
        if positions is not None:
            self.delta = int(positions[:, -1].max()) + 1 - self.num_tokens


@dataclass(frozen=True)
class StepMedia:
    """The media of one step."""

    media: MediaRows | None  # None: all placeholders are in other steps
    prompt_rows: torch.Tensor | None = None  # with M-RoPE: rows of prompts that have media
    prompt_positions: torch.Tensor | None = None  # [3, len(prompt_rows)]
    spans: tuple[SpanRows, ...] = ()


class MediaStore:
    """With pipeline stages, the first one alone has embeddings."""

    def __init__(
        self,
        model: VisionModel,
        tables: RequestTables,
        encoder: MediaEncoder | None,
        num_adapter_slots: int,
    ) -> None:
        self.model = model
        self.encoder = encoder  # None: an earlier pipeline stage has it
        self.num_adapter_slots = num_adapter_slots
        self.device = tables.device
        self._rows: dict[bytes, torch.Tensor] = {}  # embeddings of items, by their hash
        self._prompts: dict[int, _Prompt] = {}  # of requests with media, by slot
        # The difference of rotary positions from indexes after the prompt, by slot.
        self.rope_deltas: torch.Tensor | None = None
        if model.uses_mrope:
            self.rope_deltas = torch.zeros_like(tables.num_tokens)

    def run(self, jobs: Sequence[MediaJob]) -> None:
        """Run a plan's jobs. No step reads an item that it drops."""
        for job in jobs:
            if isinstance(job, DropMedia):
                self._rows.pop(job.hash, None)
        by_adapter: dict[int | None, list[EncodeMedia]] = {}
        for job in jobs:
            if isinstance(job, EncodeMedia):
                by_adapter.setdefault(job.adapter_slot, []).append(job)
        if self.encoder is None:
            return
        for slot, own in by_adapter.items():
            with nullcontext() if slot is None else adapter_context(self._row_with(slot)):
                for job, rows in zip(own, self.encoder.encode(own), strict=True):
                    self._rows[job.item.hash] = rows

    def _row_with(self, slot: int) -> AdapterStep:
        """One row that uses an adapter slot."""
        if self.device.type == "cuda":
            from penstock.ops.triton.lora_tiles import DeviceAdapterStep

            slots = torch.tensor([slot], dtype=torch.int32, device=self.device)
            return DeviceAdapterStep.empty(slots, self.num_adapter_slots).group()
        return adapter_step(np.array([slot]), self.num_adapter_slots)

    def clear(self) -> None:
        """Forget all embeddings. The scheduler does, too."""
        self._rows.clear()

    def add(self, slot: int, request: NewRequest) -> None:
        if not request.media and not request.spans:
            return
        positions = None
        if self.rope_deltas is not None:
            positions = self.model.rope_positions(request.num_prompt_tokens, request.media)
        prompt = self._prompts[slot] = _Prompt(request, positions)
        if self.rope_deltas is not None and prompt.delta:
            self.rope_deltas[slot] = prompt.delta

    def remove(self, slot: int) -> None:
        prompt = self._prompts.pop(slot, None)
        if prompt is not None and self.rope_deltas is not None and prompt.delta:
            self.rope_deltas[slot] = 0

    def find(self, layout: StepLayout) -> StepMedia | None:
        """What the step needs of media. None: no prompt with media is in it."""
        chunks = list(self._chunks(layout)) if self._prompts else []
        if not chunks:
            return None
        rows: list[IntArray] = []
        values: list[torch.Tensor] = []
        spans: list[SpanRows] = []
        in_window = self.model.spans != "prompt"
        for index, prompt, row, first, count in chunks:
            for start, end in prompt.spans:
                if first < end and start < first + count:
                    begin = max(start, first)
                    seen = slice(row + begin - first, row + end - first)
                    spans.append(SpanRows(index, seen, begin, end, in_window))
            for item in prompt.items if self.encoder is not None else ():
                taken = 0  # rows of the item's earlier runs
                for distance, length in item.runs:
                    start = max(item.offset + distance, first)
                    end = min(item.offset + distance + length, first + count)
                    if start < end:
                        skipped = taken + start - item.offset - distance
                        rows.append(np.arange(row + start - first, row + end - first))
                        values.append(self._rows[item.hash][skipped : skipped + end - start])
                    taken += length
        media = None
        if rows:
            media = MediaRows(to_device(np.concatenate(rows), self.device), torch.cat(values))
        if self.rope_deltas is None:
            return StepMedia(media, spans=tuple(spans))
        own, positions = [], []
        for _, prompt, row, first, count in chunks:
            assert prompt.positions is not None
            known = prompt.positions[:, first : first + count]
            own.append(np.arange(row, row + known.shape[1]))
            positions.append(known)
        return StepMedia(
            media,
            to_device(np.concatenate(own), self.device),
            to_device(np.concatenate(positions, axis=1), self.device),
            tuple(spans),
        )

    def attach(self, inputs: ForwardInputs, step: StepMedia | None) -> ForwardInputs:
        """Add media and rotary positions to the inputs of a step, which are in place."""
        if step is not None:
            context = replace(inputs.context, media=step.media, spans=step.spans)
            inputs = replace(inputs, context=context)
        has_deltas = bool(self._prompts) or self.device.type == "cuda"  # graphs serve all requests
        if self.rope_deltas is None or not has_deltas:
            return inputs
        positions = inputs.positions + self.rope_deltas[inputs.context.token_slots]
        if step is not None:
            positions = positions.expand(3, -1).clone()
            assert step.prompt_rows is not None
            assert step.prompt_positions is not None
            positions[:, step.prompt_rows] = step.prompt_positions
        return replace(inputs, rope_positions=positions)

    def _chunks(self, layout: StepLayout) -> Iterator[tuple[int, _Prompt, int, int, int]]:
        """The prompts with media in a step: index, prompt, first row and position, rows."""
        for index, slot in enumerate(layout.slots.tolist()):
            prompt = self._prompts.get(slot)
            if prompt is None:
                continue
            count = int(layout.counts[index])
            first = int(layout.seq_lens[index]) - count  # exact: prompts have no drafts
            if first < prompt.num_tokens:
                yield index, prompt, int(layout.starts[index]), first, count
