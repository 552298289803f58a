"""Maps names and shapes of a checkpoint to those of transformers' modules.

Transformers declares for each model type what to rename and which tensors to merge (such as the
experts of a layer). This module applies it while tensors stream in.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from penstock.ops.blocks import BlockTensor, Weight
from penstock.ops.gguf_blocks import dequantize
from penstock.protocol.errors import ModelError

Part = tuple[str, str, Any]  # checkpoint name, matching pattern, tensor


class CheckpointNames:
    """Must be made while all modules are still transformers' own."""

    def __init__(self, model: PreTrainedModel) -> None:
        mapping = get_model_conversion_mapping(model)
        self._renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        self._converters = [each for each in mapping if isinstance(each, WeightConverter)]
        self._known = model.state_dict()  # on the meta device: names and shapes
        self._prefix = model.base_model_prefix
        self._model = model

    def convert(self, tensors: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        """Yield tensors under the model's names.

        Tensors to be merged wait until all have arrived.
        """
        waiting: dict[str, list[Part]] = {}
        for name, tensor in tensors:
            own_name, pattern = self._rename(name)
            if pattern is None:
                yield own_name, tensor
                continue
            floats = dequantize(tensor) if isinstance(tensor, BlockTensor) else tensor
            waiting.setdefault(own_name, []).append((name, pattern, floats))
        while waiting:
            own_name, parts = waiting.popitem()
            yield from self._put_together(own_name, parts)

    def _rename(self, name: str) -> tuple[str, str | None]:
        own_name, pattern = rename_source_key(
            name, self._renamings, self._converters, self._prefix, self._known
        )
        if own_name not in self._known and name in self._known:
            return name, None
        return own_name, pattern

    def _put_together(self, own_name: str, parts: list[Part]) -> Iterator[tuple[str, torch.Tensor]]:
        wanted = parts[0][1]
        converter = copy.deepcopy(
            next(each for each in self._converters if wanted in each.source_patterns)
        )
        for name, pattern, tensor in sorted(parts, key=lambda part: dot_natural_key(part[0])):
            converter.add_tensor(own_name, name, pattern, tensor)
        try:
            made = converter.convert(own_name, model=self._model, config=self._model.config)
        except Exception as error:  # third-party code may raise anything
            raise ModelError(
                f"the checkpoint's tensors for {own_name} cannot be merged: {error}"
            ) from error
        for name, tensor in made.items():
            yield name, tensor[0] if isinstance(tensor, list) else tensor
