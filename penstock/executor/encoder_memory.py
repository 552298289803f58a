"""What media need of a GPU's memory: the embeddings that are kept, and the tower's largest pass."""

from __future__ import annotations

import torch

from penstock.executor.peak_memory import peak_bytes
from penstock.models.base import Model
from penstock.models.vision import VisionModel
from penstock.protocol.limits import StepLimits


def embeddings_bytes(model: Model, limits: StepLimits) -> int:
    """Of all embeddings that are kept, and of those that a step reads together."""
    assert isinstance(model, VisionModel)
    num_rows = limits.encoder_rows + min(limits.encoder_rows, limits.max_num_batched_tokens)
    itemsize = next(model.tower.parameters()).itemsize
    return num_rows * limits.encoder_width * itemsize


def measure_pass(model: Model, limits: StepLimits, device: torch.device) -> int:
    """Bytes that the largest pass needs beyond the weights.

    One item may have as many embeddings as are kept. The pass also compiles kernels, so that the
    first image does not wait for them.
    """
    assert isinstance(model, VisionModel)
    tower = model.tower

    def compute() -> None:
        given = tower.blank(limits.encoder_rows)
        raw = given.pixels.float()  # the items have them while the tower runs
        tower(given.pixels, tower.arrange(given.shape))
        del raw

    return peak_bytes(device, compute)
