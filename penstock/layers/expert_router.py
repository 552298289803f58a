"""The router of a layer with experts: which of them each token goes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from penstock.layers.build import Build
from penstock.layers.linear import Linear, Part
from penstock.layers.loadable import Expected, Shape
from penstock.layers.quantization import DeferredQuantization, DenseMethod, LinearMethod
from penstock.ops.blocks import BlockTensor, Weight

if TYPE_CHECKING:
    from penstock.layers.experts import ExpertsConfig


class Router(Linear):
    """The experts' scores. A small layer, replicated on every rank and never quantized."""

    def __init__(self, build: Build, config: ExpertsConfig) -> None:
        if config.router_float32:
            build = replace(build, dtype=torch.float32, linear_method=_float32_method(build))
        super().__init__(
            build, config.hidden_size, [Part("", config.num_experts, 1)], config.router_bias
        )
        self.dtype = torch.float32 if config.router_float32 else None
        self.may_quantize = False
        self.correction: nn.Parameter | None = None
        if config.correction:
            data = torch.empty(config.num_experts, dtype=torch.float32, device=build.device)
            self.correction = nn.Parameter(data, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if self.dtype is None else x.to(self.dtype))

    def expected(self) -> Mapping[tuple[str, str], Shape | Expected]:
        shapes = dict(super().expected())
        if self.correction is not None:
            shapes["e_score_correction_bias", ""] = tuple(self.correction.shape)
        return shapes

    def load(self, parameter: str, part: str, tensor: Weight) -> None:
        if parameter != "e_score_correction_bias":
            super().load(parameter, part, tensor)
            return
        assert self.correction is not None
        assert not isinstance(tensor, BlockTensor)
        self.correction.copy_(tensor)


def _float32_method(build: Build) -> LinearMethod:
    """Keeps weights in float32. In the C++ library, a row does not depend on its neighbours."""
    method = build.linear_method
    if build.device.type == "cpu" and method.packs and not isinstance(method, DeferredQuantization):
        from penstock.layers.native import NativeMethod  # needs the library, which is loaded

        return NativeMethod(float_dtype=torch.float32)
    return DenseMethod()
