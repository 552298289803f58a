"""Prepares transformers' modules for the loader: matrices, memory, `Loadable`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from penstock.layers.build import Build
from penstock.layers.embedding import VocabEmbedding
from penstock.layers.linear import Linear, Part
from penstock.layers.loadable import Expected, Loadable
from penstock.ops.blocks import BlockTensor, Weight
from penstock.ops.gguf_blocks import dequantize
from penstock.protocol.errors import ModelError


class BatchedLinear(Linear):
    """A linear layer that takes [..., in_features], as transformers' layers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return super().forward(flat).view(*x.shape[:-1], -1)


class TiedHead(nn.Module):
    """The embedding's matrix as the LM head."""

    def __init__(self, embedding: VocabEmbedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return self.embedding.project(flat).view(*x.shape[:-1], -1)


def replace_matrices(build: Build, model: PreTrainedModel, linears: Collection[str]) -> nn.Module:
    """Replace these linear layers and the embedding with Penstock's layers.

    Returns the embedding. An embedding that does more than look up rows is kept, with a head that
    shares its matrix.
    """
    embedding = model.get_input_embeddings()
    tied = [path for path in linears if model.get_submodule(path).weight is embedding.weight]
    for path in set(linears).difference(tied):
        linear = model.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        part = Part("", linear.out_features, 1)
        own = BatchedLinear(build, linear.in_features, [part], linear.bias is not None)
        model.set_submodule(path, own)
    if type(embedding) is not nn.Embedding or any(
        model.get_submodule(path).bias is not None for path in tied
    ):
        return embedding
    own_embedding = VocabEmbedding(build, embedding.num_embeddings, embedding.embedding_dim)
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if module is embedding:
            model.set_submodule(path, own_embedding)
        elif path in tied:
            model.set_submodule(path, TiedHead(own_embedding))
    return own_embedding


def materialize(model: PreTrainedModel, device: torch.device) -> None:
    """Give a model on the meta device memory, and fill buffers that checkpoints do not contain."""
    made: dict[int, tuple[torch.Tensor, nn.Parameter]] = {}  # shared ones once; kept for their id
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                data = torch.empty_like(parameter, device=device)
                made[id(parameter)] = parameter, nn.Parameter(data, requires_grad=False)
            own = made[id(parameter)][1]
            own.__dict__["_is_hf_initialized"] = True  # transformers must not fill it
            module._parameters[name] = own
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
        module.__dict__["_is_hf_initialized"] = not module._buffers
    fill_buffers: Any = model.initialize_weights  # untyped
    fill_buffers()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise ModelError(
                    f"{type(model).__name__} cannot run on transformers' implementation: "
                    f"{path}.{name} "
                    "is a tensor that is neither a parameter nor a buffer"
                )


def make_loadable(model: nn.Module) -> None:
    """Let the loader fill the parameters and buffers of transformers' own modules."""
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, Loadable):
            continue
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or name in module._non_persistent_buffers_set or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            tensors[name] = tensor
        if tensors:
            filler = _Filler(tensors)
            module.__dict__.update(expected=filler.expected, load=filler.load)


class _Filler:
    """The methods of `Loadable` for one module's own tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def expected(self) -> dict[tuple[str, str], Expected]:
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        return {(name, ""): Expected(shape, rows=None) for name, shape in shapes.items()}

    def load(self, parameter: str, part: str, tensor: Weight) -> None:
        floats = dequantize(tensor) if isinstance(tensor, BlockTensor) else tensor
        self.tensors[parameter].copy_(floats)
