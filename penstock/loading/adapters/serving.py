"""Makes the weights that adapter slots hold: everything an adapter changes becomes a sum.

Biases and embeddings that an adapter has as a whole are compared with the model's own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from penstock.layers.embedding import VocabEmbedding
from penstock.layers.linear import Linear
from penstock.layers.lora import AdapterWeights, PartDelta
from penstock.loading.adapters.deltas import AdapterDeltas
from penstock.loading.adapters.places import HEAD
from penstock.protocol.errors import AdapterError

_NUM_COMPARED = 64  # rows of an embedding
_LARGEST_ERROR = 0.1  # of a quantized matrix, relative to its norm


def serving_weights(deltas: AdapterDeltas, model: Any, dtype: torch.dtype) -> AdapterWeights:
    """An adapter's weights as differences to those of a loaded model."""
    linear = dict(deltas.linear)
    for (path, part), bias in deltas.biases.items():
        layer = model.get_submodule(path)
        assert isinstance(layer, Linear)
        added = _bias_difference(layer, part, bias)
        delta = linear.get((path, part))
        if delta is None:
            size, inputs = layer.parts[part].out_features, layer.full_in_features
            delta = PartDelta(
                torch.empty(0, inputs, dtype=dtype), torch.empty(size, 0, dtype=dtype)
            )
        own = added if delta.bias is None else added + delta.bias
        linear[path, part] = replace(delta, bias=own)
    replaced = dict(deltas.replaced)
    for path, matrix in deltas.copies.items():
        if path not in replaced and not _is_copy(model, path, matrix):
            replaced[path] = matrix
    embedding = dict(deltas.embedding)
    for path, (tokens, rows) in deltas.tokens.items():
        if path in embedding or path in replaced:
            raise AdapterError(f"trained tokens and another adapter of {path} cannot be combined")
        embedding |= _token_deltas(model, path, tokens, rows, dtype)
    return AdapterWeights(deltas.rank, linear, embedding, replaced, deltas.experts)


def _bias_difference(layer: Linear, part: str, bias: torch.Tensor) -> torch.Tensor:
    """What to add to a layer's bias. With several ranks, only this rank's rows matter."""
    assert layer.bias is not None
    own = layer.rows_of(layer.bias, part).float().cpu()
    rows, _ = layer.shard_of(part)
    difference = bias.clone()
    difference[rows] -= own
    return difference


def _is_copy(model: Any, path: str, matrix: torch.Tensor) -> bool:
    """Whether a matrix is the model's own, but for quantization and rounding."""
    layer = _embedding(model, path)
    ids = torch.linspace(0, layer.rows - 1, min(_NUM_COMPARED, layer.rows)).long()
    ids = ids[ids + layer.first < layer.vocab_size]
    if not len(ids):  # this rank holds only padding
        return True
    own = layer.method.embed(layer, ids.to(layer.build.device)).float().cpu()
    given = matrix[ids + layer.first].float()
    return bool((own - given).norm() <= _LARGEST_ERROR * own.norm())


def _token_deltas(
    model: Any, path: str, tokens: list[int], rows: torch.Tensor, dtype: torch.dtype
) -> dict[str, PartDelta]:
    """New rows of single tokens as a delta with a rank for each token; of a tied head too."""
    layer = _embedding(model, path)
    if layer.build.tp.size > 1:
        raise AdapterError("trainable_token_indices need tensor_parallel_size 1")
    ids = torch.tensor(tokens)
    own = layer.method.embed(layer, ids.to(layer.build.device)).float().cpu()
    difference = (rows - own).to(dtype)  # [tokens, hidden_size]
    choice = torch.zeros(len(tokens), layer.vocab_size, dtype=dtype)
    choice[torch.arange(len(tokens)), ids] = 1.0
    found = {path: PartDelta(choice, difference.T.contiguous())}
    if getattr(model, HEAD, None) is None and layer.build.generates:
        found[HEAD] = PartDelta(difference, choice.T.contiguous())
    return found


def _embedding(model: Any, path: str) -> VocabEmbedding:
    """The embedding at `path`. A tied head has no module of its own."""
    modules = dict(model.named_modules())
    if path == HEAD and not isinstance(modules.get(path), VocabEmbedding):
        return next(module for module in modules.values() if isinstance(module, VocabEmbedding))
    layer = modules[path]
    assert isinstance(layer, VocabEmbedding)
    return layer
