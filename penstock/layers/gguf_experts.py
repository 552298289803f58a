"""Experts that stay in GGUF quantization blocks, on devices whose ops decode them."""

from __future__ import annotations

import torch

from penstock.layers.build import Build
from penstock.layers.experts import ExpertsConfig, ExpertWeights
from penstock.ops.blocks import BlockTensor, Weight
from penstock.ops.gguf import BlockMatrix, stack_gguf


class GgufExperts(ExpertWeights):
    """The matrices of all experts, concatenated by gate, up and down.

    Gate and up are together if they have the same type.
    """

    def __init__(self, build: Build, config: ExpertsConfig) -> None:
        super().__init__(build, config)
        self._parts: dict[str, dict[int, BlockTensor]] = {
            name: {} for name in ("gate_proj", "up_proj", "down_proj")
        }
        self.gate_up: list[BlockMatrix] = []
        self.down: BlockMatrix | None = None

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.build.ops.gguf_experts(
            x, weights, ids, self.gate_up, self.down, self.config.activation
        )

    def linear(self, expert: int, matrix: str, x: torch.Tensor) -> torch.Tensor:
        assert self.down is not None
        outputs = [
            self.build.ops.gguf_linear(x, self._rows(own, expert), None)
            for own in (self.gate_up if matrix == "gate_up" else [self.down])
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def matrices_of(self, expert: int) -> list[torch.Tensor]:
        assert self.down is not None
        rows = [self._rows(own, expert) for own in (*self.gate_up, self.down)]
        return [tensor for own in rows for tensor in own.tensors().values()]

    def _rows(self, matrix: BlockMatrix, expert: int) -> BlockMatrix:
        size = matrix.shape[0] // len(self.config.own_experts)
        return matrix.rows(expert * size, (expert + 1) * size)

    def load(self, parameter: str, part: str, tensor: Weight) -> None:
        expert, name = self.place_of(part)
        own = self.shard(part).cut(tensor)
        assert isinstance(own, BlockTensor), "floats are for StackedExperts"
        self._parts[name][expert] = own
        self._stack()

    def _stack(self) -> None:
        """Concatenate the matrices of a kind once all have arrived."""
        count = len(self.config.own_experts)
        gates, ups, downs = self._parts.values()
        if self.down is None and len(downs) == count:
            self.down = self._stacked("down", [downs[expert] for expert in range(count)])
            downs.clear()
        if not self.gate_up and len(gates) == len(ups) == count:
            order = range(count)
            if gates[0].type_name == ups[0].type_name:
                both = [half[expert] for expert in order for half in (gates, ups)]
                self.gate_up = [self._stacked("gate_up", both)]
            else:
                self.gate_up = [
                    self._stacked("gate", [gates[expert] for expert in order]),
                    self._stacked("up", [ups[expert] for expert in order]),
                ]
            gates.clear()
            ups.clear()

    def _stacked(self, name: str, matrices: list[BlockTensor]) -> BlockMatrix:
        assert len({matrix.type_name for matrix in matrices}) == 1, "a file has them in one tensor"
        device = self.build.device
        whole = stack_gguf([matrix.to(device) for matrix in matrices])
        stacked: BlockMatrix = self.build.ops.prepare_gguf(whole, device)
        for field, data in stacked.tensors().items():
            # A buffer, so that it counts in the model's size.
            self.register_buffer(f"{name}_{field}", data, persistent=False)
        return stacked
