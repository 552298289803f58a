"""Quantized experts on a GPU: one tensor for each matrix of all experts, for one kernel."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import nn

from penstock.layers.build import Build
from penstock.layers.experts import (
    DeferredExperts,
    ExpertsConfig,
    ExpertWeights,
    choose_implementation,
)
from penstock.layers.loadable import Expected
from penstock.layers.quantization import LinearMethod
from penstock.layers.quantized.schemes import Scheme
from penstock.layers.quantized.weights import (
    SHARED,
    Int8Weight,
    QuantizedWeight,
    TableWeight,
    W4Weight,
    fuse,
)
from penstock.ops.blocks import BlockTensor, Weight
from penstock.ops.registry import Ops
from penstock.protocol.errors import ModelError

INPUT_SCALES = ("input_scale", "activation_scale")
# Replaces the scale 0 of an expert that saw no calibration token. Other scales are larger.
UNSEEN = torch.finfo(torch.float32).tiny


def decide_experts(
    deferred: DeferredExperts,
    plain: LinearMethod,
    scheme: Scheme | None,
    present: Mapping[str, Collection[str]],
) -> tuple[nn.Module, str]:
    """The module that replaces deferred experts, and why it was chosen."""
    build, config = replace(deferred.build, linear_method=plain), deferred.config
    if scheme is None:
        implementation, choice = choose_implementation(build, config)
        return implementation.make(build, config), choice
    return QuantizedExperts(build, config, scheme, present), f"quantized: {scheme.label}"


class QuantizedExperts(ExpertWeights):
    """Like StackedExperts, with the weights of a scheme: one op computes all experts."""

    def __init__(
        self,
        build: Build,
        config: ExpertsConfig,
        scheme: Scheme,
        present: Mapping[str, Collection[str]],
    ) -> None:
        super().__init__(build, config)
        self.scheme = scheme
        self.present = present
        self._staged: dict[str, dict[str, torch.Tensor]] = {}
        self._halves: dict[int, dict[str, QuantizedWeight]] = {}  # gate or up, without the other
        self.gate_up = Stack(len(config.own_experts))
        self.down = Stack(len(config.own_experts))

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        first, down = self.gate_up.weight, self.down.weight
        assert first is not None, "the experts have no weights yet"
        gate_up_bias, down_bias = self.biases()
        return first.experts(
            self.build.ops, down, x, weights, ids, activation=self.config.activation,
            gate_up_bias=gate_up_bias, down_bias=down_bias,
        )  # fmt: skip

    def matrices_of(self, expert: int) -> list[torch.Tensor]:
        matrices = (self.gate_up.matrix(expert), self.down.matrix(expert))
        return [
            tensor
            for matrix in matrices
            for name, tensor in matrix.tensors().items()
            if name not in SHARED
        ]

    def linear(self, expert: int, matrix: str, x: torch.Tensor) -> torch.Tensor:
        stack = self.gate_up if matrix == "gate_up" else self.down
        return stack.matrix(expert).linear(self.build.ops, x, None)

    def tensors(self, part: str) -> Mapping[str, Expected]:
        missing = self.scheme.optional.difference(self.present.get(part, ()))
        tensors = self.scheme.expected(self.shape(part))
        return {name: tensor for name, tensor in tensors.items() if name not in missing}

    def load(self, parameter: str, part: str, tensor: Weight) -> None:
        if isinstance(tensor, BlockTensor):
            raise ModelError("a GGUF file is quantized already: leave --quantization out")
        if parameter == "bias":
            self.load_bias(part, tensor)
            return
        expected, shard = self.tensors(part), self.shard(part)
        staged = self._staged.setdefault(part, {})
        own = shard.cut_packed(parameter, tensor, expected[parameter])
        if parameter in INPUT_SCALES and own.is_floating_point():
            own = own.float().masked_fill(own == 0, UNSEEN)
        staged[parameter] = own.to(self.build.device)
        if len(staged) < len(expected):
            return
        del self._staged[part]
        expert, name = self.place_of(part)
        self.put(expert, name, self.scheme.convert(staged, shard))

    def put(self, expert: int, name: str, weight: QuantizedWeight) -> None:
        """Store this rank's share of one matrix of an expert."""
        if name == "down_proj":
            self.down.put(expert, weight)
            return
        halves = self._halves.setdefault(expert, {})
        halves[name] = weight
        if len(halves) == 2:
            del self._halves[expert]
            fused = fuse([halves["gate_proj"], halves["up_proj"]])
            if len(fused) != 1:
                number = self.config.own_experts[expert]
                raise ModelError(
                    f"gate_proj and up_proj of expert {number} have their columns in different "
                    "orders or groups, which experts cannot have here: quantize them alike, with "
                    "desc_act=False"
                )
            self.gate_up.put(expert, fused[0])

    def finish_loading(self) -> None:
        """Convert the weights to the layout that is fastest for the ops."""
        first, second = self.gate_up.weight, self.down.weight
        if isinstance(first, TableWeight) and isinstance(second, TableWeight):
            _check_same_table(first, second)
        for weight in (first, second):
            scale = getattr(weight, "input_scale", None)
            if scale is not None:  # one for the experts of all ranks
                scale.copy_(self.build.mesh.ep.stack(scale).amax(0))
            if scale is not None and float(scale) <= UNSEEN:
                raise ModelError(
                    "input_scale is 0 for all experts of a layer: the model was quantized without "
                    "calibration; quantize it again"
                )
        self.gate_up.prepare(self.build.ops)
        self.down.prepare(self.build.ops)


class Stack(nn.Module):
    """One matrix of each expert, with every field in one tensor [experts, ...]."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.weight: QuantizedWeight | None = None

    def put(self, expert: int, weight: QuantizedWeight) -> None:
        if isinstance(weight, Int8Weight):  # there is no int8 op for experts
            packed, scales = weight.weight.view(torch.uint8) ^ 128, weight.scale[:, None]
            weight = W4Weight(packed, scales, None, packed.shape[1], bits=8)
        if isinstance(weight, W4Weight) and weight.perm is not None:
            raise ModelError(
                "experts in GPTQ's activation order are not supported: quantize with desc_act=False"
            )
        weight = self._matching(weight)
        if self.weight is None:
            self.weight = self._empty_like(weight)
        own = self.weight.tensors()
        for name, tensor in weight.tensors().items():
            if name == "input_scale":  # one for all experts: the largest overflows in none
                own[name].copy_(torch.maximum(own[name], tensor))
            elif name == "values":
                _check_same_table(self.weight, weight)
            elif own[name].shape[1:] != tensor.shape:
                raise ModelError(
                    f"the {name} of expert {expert} have shape {list(tensor.shape)}, other "
                    f"experts' {list(own[name].shape[1:])}: quantize all in groups of one size"
                )
            else:
                own[name][expert].copy_(tensor)

    def matrix(self, expert: int) -> QuantizedWeight:
        """The matrix of one expert, sharing memory."""
        assert self.weight is not None, "the experts have no weights yet"
        fields = self.weight.tensors().items()
        own = {name: tensor[expert] for name, tensor in fields if name not in SHARED}
        return replace(self.weight, **own)  # type: ignore[type-var]

    def prepare(self, ops: Ops) -> None:
        assert self.weight is not None, "the experts have no weights yet"
        self.weight = self.weight.prepare(ops)
        for name, tensor in self.weight.tensors().items():
            self.register_buffer(f"stacked_{name}", tensor, persistent=False)

    def _empty_like(self, weight: QuantizedWeight) -> QuantizedWeight:
        fields = {}
        for name, tensor in weight.tensors().items():
            if name == "input_scale":
                fields[name] = torch.zeros_like(tensor)
            elif name == "values":
                fields[name] = tensor.clone()
            else:
                shape = (self.count, *tensor.shape)
                fields[name] = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            # A buffer, so that it counts in the model's size.
            self.register_buffer(f"stacked_{name}", fields[name], persistent=False)
        return replace(weight, **fields)  # type: ignore[type-var]

    def _matching(self, weight: QuantizedWeight) -> QuantizedWeight:
        """The weight, with zeros if other experts have them: some matrices may be symmetric."""
        if not isinstance(weight, W4Weight) or self.weight is None:
            return weight
        assert isinstance(self.weight, W4Weight)
        half = 1 << (weight.bits - 1)
        if weight.zeros is None and self.weight.zeros is not None:
            return replace(weight, zeros=torch.full_like(self.weight.zeros[0], half))
        if weight.zeros is not None and self.weight.zeros is None:
            shape = (self.count, *weight.zeros.shape)
            zeros = torch.full(shape, half, dtype=torch.uint8, device=weight.zeros.device)
            self.register_buffer("stacked_zeros", zeros, persistent=False)
            self.weight = replace(self.weight, zeros=zeros)
        return weight


def _check_same_table(one: QuantizedWeight, other: QuantizedWeight) -> None:
    assert isinstance(one, TableWeight)
    assert isinstance(other, TableWeight)
    if not torch.equal(one.values, other.values):
        raise ModelError(
            "experts of one layer have different quant_map tables: quantize them alike"
        )
