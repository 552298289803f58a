"""Shared parts of recurrent layers: states, the causal convolution, per-head parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from penstock.layers.build import Build
from penstock.layers.context import ForwardContext, current_context
from penstock.layers.linear import Part
from penstock.layers.loadable import copy_shard
from penstock.ops.attention import AttentionMetadata
from penstock.ops.blocks import BlockTensor, Weight
from penstock.ops.recurrent import StateStep
from penstock.protocol.errors import ConfigError
from penstock.protocol.kv import RecurrentSpec

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class RecurrentLayer(nn.Module):
    """Keeps two states per request: the convolution's last tokens, and the layer's memory."""

    def __init__(
        self,
        build: Build,
        name: str,
        memory: tuple[int, ...],  # shape of the memory on this rank
        conv: CausalConv,
        gates: tuple[tuple[int, torch.dtype], ...],  # numbers of a token beside the convolution's
    ) -> None:
        super().__init__()
        self.build = build
        self.name = name
        self.memory_shape = memory
        self.conv1d = conv
        self.inputs = ((conv.channels, build.dtype), *gates)

    def recur(self, *inputs: torch.Tensor) -> torch.Tensor:
        """`_recur` over the step's rows, with the states of this layer.

        `inputs` [n, size] are those of `self.inputs`. Those of drafts are kept for `replay`.
        """
        context = current_context()
        step = context.state_step(self.name)
        if step.drafts is not None:
            rows = step.drafts.step_rows
            for kept, x in zip(context.draft_inputs[self.name], inputs, strict=True):
                kept[: rows.stop - rows.start] = x[rows]
        memory, tokens = context.states[self.name]
        return self._recur(inputs, memory, tokens, step)

    def replay(self, context: ForwardContext, step: StateStep) -> None:
        """Store the states after the drafts that `step` replays."""
        assert step.drafts is not None
        memory, tokens = context.states[self.name]
        inputs = tuple(kept[step.drafts.step_rows] for kept in context.draft_inputs[self.name])
        self._recur(inputs, memory, tokens, step)

    def _recur(
        self,
        inputs: tuple[torch.Tensor, ...],
        memory: torch.Tensor,  # [num_blocks, *memory_shape]
        tokens: torch.Tensor,  # [num_blocks, width - 1, channels]
        step: StateStep,
    ) -> torch.Tensor:
        """The convolution and the recurrence. They read and write the states of the step."""
        raise NotImplementedError

    def kv_spec(self, dtype: str) -> RecurrentSpec:
        """`dtype` is that of keys and values.

        Memories are float32, because their errors accumulate.
        """
        return RecurrentSpec(
            shapes=(self.memory_shape, (self.conv1d.width - 1, self.conv1d.channels)),
            dtypes=("float32", DTYPE_NAMES[self.build.dtype]),
            inputs=tuple((size, DTYPE_NAMES[dtype]) for size, dtype in self.inputs),
        )


def recurrent_layers(model: nn.Module) -> list[RecurrentLayer]:
    return [module for module in model.modules() if isinstance(module, RecurrentLayer)]


def replay_drafts(
    layers: Iterable[RecurrentLayer], context: ForwardContext, num_accepted: torch.Tensor
) -> None:
    """Store the states after the accepted drafts of the step whose context this is.

    `num_accepted`: [num_requests] int32, of the requests of `StateStep.drafts`.
    """
    steps: dict[int, StateStep] = {}  # by the forward pass's
    for layer in layers:
        forward = context.state_step(layer.name)
        assert forward.drafts is not None
        if id(forward) not in steps:
            steps[id(forward)] = forward.drafts.replay(num_accepted)
        layer.replay(context, steps[id(forward)])


def keep_drafts(
    layers: Iterable[RecurrentLayer],
    context: ForwardContext,
    num_requests: int,
    num_rows: int,
    first_row: int = 0,
) -> ForwardContext:
    """For `replay_drafts` after later steps: copies of what these overwrite.

    Of the last requests of the step, which have drafts. Their rows begin at `first_row` of
    `draft_inputs`.
    """
    copies: dict[int, AttentionMetadata] = {}  # by the group's metadata
    attention, inputs = {}, {}
    for layer in layers:
        of_step = context.attention[layer.name]
        if id(of_step) not in copies:
            copies[id(of_step)] = AttentionMetadata(
                query_starts=of_step.query_starts[-num_requests - 1 :].clone(),
                seq_lens=of_step.seq_lens[-num_requests:].clone(),
                block_table=of_step.block_table[-num_requests:].clone(),
                slot_mapping=of_step.slot_mapping[-num_rows:].clone(),
                num_decodes=0,
                max_query_len=of_step.max_query_len,
                max_seq_len=of_step.max_seq_len,
                num_drafting=num_requests,
            )
        attention[layer.name] = copies[id(of_step)]
        rows = slice(first_row, first_row + num_rows)
        inputs[layer.name] = tuple(part[rows].clone() for part in context.draft_inputs[layer.name])
    return replace(context, attention=attention, draft_inputs=inputs, _state_steps={})


class CausalConv(nn.Module):
    """A depthwise convolution over the last `width` tokens of each channel, and silu.

    Channels come in sections, each sharded over ranks separately.
    """

    def __init__(self, build: Build, sections: Sequence[Part], width: int, bias: bool) -> None:
        super().__init__()
        self.build = build
        self.sections = sections
        self.full_channels = sum(part.out_features for part in sections)
        self.channels = sum(part.out_features // part.num_shards for part in sections)
        self.width = width
        self.weight = build.empty(self.channels, width)
        self.bias = build.empty(self.channels) if bias else None

    def forward(self, x: torch.Tensor, states: torch.Tensor, step: StateStep) -> torch.Tensor:
        """[n, channels] -> the same shape. Updates `states` [num_blocks, width - 1, channels]."""
        return self.build.ops.causal_conv(x, self.weight, self.bias, states, step)

    def expected(self) -> dict[tuple[str, str], tuple[int, ...]]:
        shapes: dict[tuple[str, str], tuple[int, ...]] = {
            ("weight", ""): (self.full_channels, 1, self.width)
        }
        if self.bias is not None:
            shapes["bias", ""] = (self.full_channels,)
        return shapes

    def load(self, parameter: str, part: str, tensor: Weight) -> None:
        assert not isinstance(tensor, BlockTensor), "a convolution's weight is not a matrix"
        pieces, start = [], 0
        for section in self.sections:
            rows = section.out_features // section.num_shards
            shard = self.build.tp.rank * section.num_shards // self.build.tp.size
            pieces.append(tensor[start + shard * rows : start + (shard + 1) * rows])
            start += section.out_features
        own = torch.cat(pieces)
        self.get_parameter(parameter).copy_(own if parameter == "bias" else own[:, 0])


class HeadParameters(nn.Module):
    """Numbers of each head, float32, which checkpoints store in the layer itself.

    The loader therefore sees the layer: its `expected` and `load` call `shapes` and `take`.
    """

    def __init__(self, build: Build, num_heads: int, names: Sequence[str]) -> None:
        super().__init__()
        self.build = build
        self.full_size = num_heads
        self.size = num_heads // build.tp.size
        for name in names:
            data = torch.empty(self.size, dtype=torch.float32, device=build.device)
            self.register_parameter(name, nn.Parameter(data, requires_grad=False))

    def shapes(self) -> dict[tuple[str, str], tuple[int, ...]]:
        return {(name, ""): (self.full_size,) for name, _ in self.named_parameters()}

    def take(self, name: str, tensor: Weight) -> None:
        copy_shard(self.get_parameter(name), tensor, self.build.tp)


def check_heads(ranks: int, kind: str, num_heads: int) -> None:
    """Refuse a tensor-parallel size that does not divide a layer's heads."""
    if num_heads % ranks:
        raise ConfigError(
            f"tensor_parallel_size must divide the model's {num_heads} {kind} heads, got {ranks}"
        )
