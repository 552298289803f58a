"""Applies grammar masks to logits: finds the rows they belong to and the way to apply them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.ops.sharded_sampling import VocabShard
from penstock.protocol.step import StepMasks
from penstock.runner.layout import StepLayout
from penstock.runner.sampling_tables import to_device

Bits = NDArray[np.int32]  # [rows, ceil(vocab_size / 32)]


def mask_logits(
    logits: torch.Tensor,
    layout: StepLayout,
    masks: StepMasks,
    keep_logits: bool,
    shard: VocabShard | None = None,
) -> torch.Tensor | None:
    """Ban the tokens that `masks` disallow from a step's logits, [rows, tokens of this rank].

    On a GPU this happens in place. On a CPU, and with `keep_logits` because the original logits are
    still needed, logits stay unchanged. Then the bits are returned for the sampler: int32 [rows,
    ceil(vocab_size / 32)].
    """
    rows, bits = _rows_of(layout, masks)
    if len(rows) == 0:
        return None
    if logits.device.type == "cuda" and not keep_logits:
        from penstock.ops.triton.bitmask import apply_bitmask  # needs Triton

        device = logits.device
        first = 0
        if shard is not None:
            logits, first = logits[:, : shard.num_tokens], shard.first
        apply_bitmask(logits, to_device(bits, device), to_device(rows, device), first)
        return None
    allowed = np.full((len(logits), bits.shape[1]), -1, dtype=np.int32)
    allowed[rows] = bits
    return to_device(allowed, logits.device)


def _rows_of(layout: StepLayout, masks: StepMasks) -> tuple[NDArray[np.int64], Bits]:
    """The rows of logits that have masks, and the bits of each."""
    num_rows = layout.rows_per_sample
    first = np.cumsum(num_rows) - num_rows
    starts = {
        layout.requests[index].request_id: start
        for index, start in zip(layout.sampling.tolist(), first.tolist(), strict=True)
    }
    rows = [
        starts[request_id] + offset
        for request_id, count in zip(masks.request_ids, masks.num_rows, strict=True)
        for offset in range(count)
    ]
    bits = np.frombuffer(masks.bits, dtype=np.int32)
    return np.array(rows, dtype=np.int64), bits.reshape(len(rows) or 1, -1)
