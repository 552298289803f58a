"""Records which experts each token was routed to: for requests that ask, and to balance load."""

from __future__ import annotations

import msgspec
import torch
from torch import nn

from penstock.layers.expert_share import expert_layers
from penstock.protocol.step import RequestResult, RoutedExperts
from penstock.runner.layout import StepLayout


class RoutedExpertsRecorder:
    """Makes every MoE layer write its choices into one buffer, which never moves."""

    def __init__(self, model: nn.Module, max_rows: int, device: torch.device) -> None:
        layers = expert_layers(model)
        top_k = max(layer.routing.top_k for layer in layers)
        # [max_rows, layers, top_k]; padded with -1 where layers differ in top_k
        shape = (max_rows, len(layers), top_k)
        self._buffer = torch.full(shape, -1, dtype=torch.int16, device=device)
        for index, layer in enumerate(layers):
            layer.record = self._buffer[:, index, : layer.routing.top_k]

    @property
    def device(self) -> torch.device:
        return self._buffer.device

    def rows(self, num_rows: int) -> torch.Tensor:
        """A launched step's choices [num_rows, layers, top_k], until the next one."""
        return self._buffer[:num_rows]

    def take(self, num_rows: int) -> torch.Tensor:
        """Start copying a launched step's choices to the host."""
        rows = self.rows(num_rows)
        if rows.device.type == "cpu":
            return rows.clone()
        host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        return host.copy_(rows, non_blocking=True)

    @staticmethod
    def attach(
        results: list[RequestResult], layout: StepLayout, taken: torch.Tensor
    ) -> list[RequestResult]:
        """Attach each request's rows to its result. The copy to the host must be complete.

        On a pipeline stage before the last, they are all that there is of a result.
        """
        if not results:
            results = [
                RequestResult(request_id=own.request_id, incarnation=own.incarnation)
                for own in layout.requests
            ]
        starts = layout.starts.tolist()
        _, num_layers, top_k = taken.shape
        rows = taken.numpy()
        return [
            msgspec.structs.replace(
                result,
                routed_experts=RoutedExperts(0, num_layers, top_k, rows[first:end].tobytes()),
            )
            for result, first, end in zip(results, starts[:-1], starts[1:], strict=True)
        ]
