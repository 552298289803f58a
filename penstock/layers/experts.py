"""A mixture of experts (MoE) in place of an MLP: router, routed experts, shared expert.

The implementation is chosen when the layer is constructed: the first of `IMPLEMENTATIONS` that does
not refuse. `Experts.choice` names it and says why earlier ones refused. Models write it to the
debug log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from penstock.layers.build import Build
from penstock.layers.expert_exchange import ExpertExchange, GatheringExchange, run_scaled
from penstock.layers.expert_placement import PlacedExperts, Placement
from penstock.layers.expert_router import Router
from penstock.layers.expert_share import take_share
from penstock.layers.gguf import GgufMethod
from penstock.layers.linear import Linear, Part, column_linear, row_linear
from penstock.layers.loadable import Expected, Shape, copy_shard
from penstock.layers.quantization import DeferredQuantization, Shard
from penstock.layers.sublayers import GatedMLP
from penstock.ops import reference
from penstock.ops.blocks import BlockTensor, Weight
from penstock.ops.experts import ACTIVATIONS, Routing, dense_experts, run_by_expert, sigmoid
from penstock.ops.gguf_blocks import dequantize
from penstock.protocol.errors import ConfigError

if TYPE_CHECKING:
    from penstock.layers.lora_experts import ExpertSlots


@dataclass(frozen=True)
class ExpertsConfig:
    """An architecture's settings of its experts. All experts have one size and one activation."""

    num_experts: int
    hidden_size: int
    intermediate_size: int  # of one expert
    routing: Routing
    activation: str = "silu"  # one of ACTIVATIONS
    bias: bool = False  # of the experts' matrices
    router_bias: bool = False
    router_float32: bool = False  # compute scores and store router weights in float32
    correction: bool = False  # a bias for the selection of experts, not for their weight
    scale_inputs: bool = False  # routing weights scale the experts' inputs, not their outputs
    shared_size: int = 0  # intermediate size of the shared expert; 0: none
    shared_gate: bool = False  # a gate scales the shared expert's output
    placement: Placement | None = None  # of whole experts; None: this rank has all, or slices
    held: tuple[int, ...] | None = None  # the experts that this rank reads; None: all

    @property
    def own_experts(self) -> Sequence[int]:
        """The experts that this rank has weights of, in the order of the weights."""
        return range(self.num_experts) if self.held is None else self.held


class Experts(nn.Module):
    """Runs every token through its `top_k` routed experts and the shared expert."""

    def __init__(self, build: Build, config: ExpertsConfig) -> None:
        super().__init__()
        own_build, config = take_share(build, config)
        if config.intermediate_size % own_build.tp.size or config.shared_size % build.tp.size:
            raise ConfigError(
                f"tensor_parallel_size must divide the experts' intermediate size of "
                f"{config.intermediate_size} (shared: {config.shared_size}), got {build.tp.size}"
            )
        self.build = build
        self.config = config
        self.routing = config.routing
        self.adapter: ExpertSlots | None = None  # of the routed experts
        self.scale_inputs = config.scale_inputs
        self.record: torch.Tensor | None = None  # [rows, top_k]: records the selected experts
        self.gate = Router(build, config)
        implementation, self.choice = choose_implementation(own_build, config)
        self.experts = implementation.make(own_build, config)
        self.placed = self.exchange = None
        if config.placement is not None:
            args = (config.placement, config.num_experts, build.mesh.ep.rank, build.device)
            self.placed = PlacedExperts(*args)
        if build.mesh.spans_replicas:
            kind = GatheringExchange if build.gathers_tokens else ExpertExchange
            self.exchange = kind(build, config.hidden_size, config.scale_inputs)
        self.shared_expert = self.shared_expert_gate = None
        if config.shared_size:
            self.shared_expert = GatedMLP(build, config.hidden_size, config.shared_size)
        if config.shared_gate:
            self.shared_expert_gate = Linear(build, config.hidden_size, [Part("", 1, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> the same shape."""
        logits = self.gate(x)
        weights, ids = self.build.ops.route(logits, self.routing, self.gate.correction)
        if self.record is not None:
            self.record[: len(ids)] = ids
        if self.exchange is not None:
            assert self.placed is not None
            slots = None if self.adapter is None else self.adapter.slots_of_rows(x)
            output = self.exchange(x, weights, ids, slots, self.placed, self._run_received)
        else:
            if self.placed is not None:
                weights, ids = self.placed.held_here(weights, ids)
            run = self._run_scaled if self.scale_inputs else self._run
            output = self.build.tp.all_reduce(run(x, weights, ids))
        if self.shared_expert is not None:
            shared = self.shared_expert(x)
            if self.shared_expert_gate is not None:
                shared = sigmoid(self.shared_expert_gate(x)) * shared
            output = output + shared
        return output

    def join(self) -> None:
        """Take part in a step in which only other replicas have tokens."""
        assert self.exchange is not None, "no other ranks wait"
        assert self.placed is not None
        self.exchange.join(
            self.placed, self._run_received, self.build.dtype, self.routing.top_k,
            has_slots=self.adapter is not None,
        )  # fmt: skip

    def _run(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if self.adapter is not None:
            return self.adapter(x, weights, ids, self.experts)
        return self.experts(x, weights, ids)

    def _run_received(
        self, slots: torch.Tensor | None, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        if self.adapter is not None:
            assert slots is not None
            return self.adapter.run_received(slots, x, weights, ids, self.experts)
        return self.experts(x, weights, ids)

    def _run_scaled(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        return run_scaled(self._run, x, weights, ids)


class ExpertWeights(nn.Module):
    """All experts of a layer. In checkpoints they are separate: ``experts.3.gate_proj.weight``.

    Ranks split the intermediate size, so the sum of their outputs is the layer's output.
    """

    def __init__(self, build: Build, config: ExpertsConfig) -> None:
        super().__init__()
        self.build = build
        self.config = config
        self.size = config.intermediate_size // build.tp.size  # on this rank
        count, hidden = len(config.own_experts), config.hidden_size
        self.gate_up_bias = build.empty(count, 2 * self.size) if config.bias else None
        self.down_bias = build.empty(count, hidden) if config.bias else None

    def biases(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The biases of gate and up, and of down.

        The latter enters the sum over ranks only once.
        """
        return self.gate_up_bias, self.down_bias if self.build.tp.rank == 0 else None

    def bias(self, expert: int, matrix: str) -> torch.Tensor | None:
        """What this rank adds to the output of an expert's "gate_up" or "down"."""
        gate_up, down = self.biases()
        own = gate_up if matrix == "gate_up" else down
        return None if own is None else own[expert]

    def tensors_of(self, expert: int) -> list[torch.Tensor]:
        """All that belongs to one of this rank's experts, in place."""
        biases = [own[expert] for own in (self.gate_up_bias, self.down_bias) if own is not None]
        return [*biases, *self.matrices_of(expert)]

    def matrices_of(self, expert: int) -> list[torch.Tensor]:
        """The tensors of an expert's matrices, in place."""
        raise NotImplementedError

    def linear(self, expert: int, matrix: str, x: torch.Tensor) -> torch.Tensor:
        """x [n, in] times an expert's "gate_up" (gate rows, then up rows) or "down", on this rank.

        Without a bias.
        """
        raise NotImplementedError

    def tensors(self, part: str) -> Mapping[str, Expected]:
        """The checkpoint tensors of one matrix, by parameter."""
        return {"weight": Expected(self.shape(part))}

    def expected(self) -> Mapping[tuple[str, str], Shape | Expected]:
        expected: dict[tuple[str, str], Shape | Expected] = {}
        for part in held_parts(self.config):
            for parameter, tensor in self.tensors(part).items():
                expected[parameter, part] = tensor
            if self.config.bias:
                expected["bias", part] = self.shape(part)[:1]
        return expected

    def shape(self, part: str) -> tuple[int, int]:
        hidden, size = self.config.hidden_size, self.config.intermediate_size
        return (hidden, size) if part.endswith("down_proj") else (size, hidden)

    def shard(self, part: str) -> Shard:
        first, hidden = self.build.tp.rank * self.size, self.config.hidden_size
        if part.endswith("down_proj"):
            return Shard(self.shape(part), 0, hidden, first, self.size)
        return Shard(self.shape(part), first, self.size, 0, hidden)

    def place_of(self, part: str) -> tuple[int, str]:
        """An expert's place among the weights of this rank, and the name of its matrix."""
        _, expert, name = part.split(".")
        return self.config.own_experts.index(int(expert)), name

    def load_bias(self, part: str, tensor: Weight) -> None:
        assert not isinstance(tensor, BlockTensor), "a bias is not a matrix"
        expert, name = self.place_of(part)
        if name == "down_proj":
            assert self.down_bias is not None
            self.down_bias[expert].copy_(tensor)
            return
        assert self.gate_up_bias is not None
        copy_shard(self.rows_of(self.gate_up_bias, expert, name), tensor, self.build.tp)

    def rows_of(self, gate_up: torch.Tensor, expert: int, name: str) -> torch.Tensor:
        """The rows of an expert's gate_proj or up_proj."""
        start = 0 if name == "gate_proj" else self.size
        return gate_up[expert, start : start + self.size]


def expert_parts(config: ExpertsConfig) -> list[str]:
    """The names of all experts' matrices."""
    return _parts(range(config.num_experts))


def held_parts(config: ExpertsConfig) -> list[str]:
    """The names of the matrices of this rank's experts."""
    return _parts(config.own_experts)


def _parts(experts: Sequence[int]) -> list[str]:
    names = ("gate_proj", "up_proj", "down_proj")
    return [f"experts.{expert}.{name}" for expert in experts for name in names]


class StackedExperts(ExpertWeights):
    """All matrices in two tensors. `compute` is an implementation of ops.experts."""

    def __init__(
        self, build: Build, config: ExpertsConfig, compute: Callable[..., torch.Tensor]
    ) -> None:
        super().__init__(build, config)
        self.compute = compute
        count, hidden = len(config.own_experts), config.hidden_size
        self.gate_up = build.empty(count, 2 * self.size, hidden)
        self.down = build.empty(count, hidden, self.size)

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.compute(
            x, weights, ids, self.gate_up, self.down, self.config.activation, *self.biases()
        )

    def matrices_of(self, expert: int) -> list[torch.Tensor]:
        return [self.gate_up[expert], self.down[expert]]

    def linear(self, expert: int, matrix: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.gate_up[expert] if matrix == "gate_up" else self.down[expert])

    def load(self, parameter: str, part: str, tensor: Weight) -> None:
        if parameter == "bias":
            self.load_bias(part, tensor)
            return
        floats = dequantize(tensor) if isinstance(tensor, BlockTensor) else tensor
        own = self.shard(part).cut(floats)
        assert isinstance(own, torch.Tensor)
        expert, name = self.place_of(part)
        if name == "down_proj":
            self.down[expert].copy_(own)
        else:
            self.rows_of(self.gate_up, expert, name).copy_(own)


class DeferredExperts(nn.Module):
    """Stands in for a quantized checkpoint's experts until the plan has chosen a scheme."""

    def __init__(self, build: Build, config: ExpertsConfig) -> None:
        super().__init__()
        self.build = build
        self.config = config


class PackedExperts(nn.ModuleDict):
    """Separate matrices per expert, as the linear method packs them."""

    def __init__(self, build: Build, config: ExpertsConfig) -> None:
        super().__init__({str(own): _Expert(build, config) for own in config.own_experts})
        self.build = build
        self.config = config
        self._own = list(self.values())

    def bias(self, expert: int, matrix: str) -> torch.Tensor | None:
        return self._matrix(expert, matrix).own_bias

    def tensors_of(self, expert: int) -> list[torch.Tensor]:
        return [*self._own[expert].parameters(), *self._own[expert].buffers()]

    def linear(self, expert: int, matrix: str, x: torch.Tensor) -> torch.Tensor:
        layer = self._matrix(expert, matrix)
        return layer.method.apply(layer, x, None)

    def _matrix(self, expert: int, matrix: str) -> Linear:
        own = self._own[expert]
        assert isinstance(own, _Expert)
        return own.gate_up_proj if matrix == "gate_up" else own.down_proj

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return run_by_expert(x, weights, ids, len(self), lambda own, rows: self._own[own](rows))


class _Expert(nn.Module):
    """One rank's share of a gated MLP. It does not sum over ranks."""

    def __init__(self, build: Build, config: ExpertsConfig) -> None:
        super().__init__()
        self.build = build
        self.activation = config.activation
        size = config.intermediate_size
        self.gate_up_proj = column_linear(
            build, config.hidden_size, {"gate_proj": size, "up_proj": size}, config.bias
        )
        self.down_proj = row_linear(build, size, config.hidden_size, config.bias)
        for layer in (self.gate_up_proj, self.down_proj):
            layer.takes_adapters = False  # they see only the rows of their expert

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up, down = self.gate_up_proj, self.down_proj
        both = gate_up.method.apply(gate_up, x, gate_up.bias)
        if self.activation == "silu":
            activated = self.build.ops.silu_mul(both)
        else:
            activated = ACTIVATIONS[self.activation](*both.chunk(2, dim=-1))
        return down.method.apply(down, activated, down.own_bias)


# -- which implementation


@dataclass(frozen=True)
class Implementation:
    name: str
    refusal: Callable[[Build, ExpertsConfig], str | None]  # why it cannot be used here
    make: Callable[[Build, ExpertsConfig], nn.Module]


def _refuse_deferred(build: Build, config: ExpertsConfig) -> str | None:
    if not isinstance(build.linear_method, DeferredQuantization):
        return "the checkpoint is not quantized"
    if build.device.type == "cpu":
        return "on a CPU each expert's matrices are quantized by themselves"
    return None


def _refuse_blocks(build: Build, config: ExpertsConfig) -> str | None:
    method = build.linear_method
    if not isinstance(method, GgufMethod) or not method.expert_blocks:
        return "the checkpoint's experts are not in blocks that the device computes with"
    return "experts with biases have no kernel for blocks" if config.bias else None


def _make_blocks(build: Build, config: ExpertsConfig) -> nn.Module:
    from penstock.layers.gguf_experts import GgufExperts  # that module imports this one

    return GgufExperts(build, config)


def _refuse_triton(build: Build, config: ExpertsConfig) -> str | None:
    if build.device.type != "cuda":
        return f"it runs on GPUs, not on {build.device.type}"
    from penstock.ops.triton.experts import refusal  # needs Triton

    size = config.intermediate_size // build.tp.size
    return refusal(config.hidden_size, size, config.activation, build.dtype)


def _make_triton(build: Build, config: ExpertsConfig) -> nn.Module:
    from penstock.ops.triton.experts import experts

    return StackedExperts(build, config, experts)


def _refuse_packed(build: Build, config: ExpertsConfig) -> str | None:
    if not build.linear_method.packs:
        return "weights are plain tensors here, not packed by the C++ library"
    return _refuse_torch(build, config)


def _refuse_torch(build: Build, config: ExpertsConfig) -> str | None:
    if build.device.type == "cuda":
        return "the host would wait for the routers' choices, which a captured graph cannot"
    return None


IMPLEMENTATIONS = (
    Implementation("quantized: as each layer's scheme says", _refuse_deferred, DeferredExperts),
    Implementation("blocks: as in the GGUF file, grouped by expert", _refuse_blocks, _make_blocks),
    Implementation("triton: grouped by expert, fused", _refuse_triton, _make_triton),
    Implementation(
        "packed: one matmul of the C++ library an expert", _refuse_packed, PackedExperts
    ),
    Implementation(
        "torch: one matmul an expert",
        _refuse_torch,
        partial(StackedExperts, compute=reference.experts),
    ),
    Implementation(
        "dense: every expert over every token",
        lambda *_: None,
        partial(StackedExperts, compute=dense_experts),
    ),
)


def choose_implementation(build: Build, config: ExpertsConfig) -> tuple[Implementation, str]:
    """The first implementation that supports them, and why it was chosen."""
    refused: list[str] = []
    for implementation in IMPLEMENTATIONS:
        reason = implementation.refusal(build, config)
        if reason is None:
            return implementation, "; ".join([implementation.name, *refused])
        refused.append(f"not {implementation.name.partition(':')[0]}: {reason}")
    raise AssertionError("the last one takes everything")
