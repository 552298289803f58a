"""The last parts of a linear layer alone: what the whole layer gives for them."""

from __future__ import annotations

import pytest
import torch

from penstock.layers.build import Build
from penstock.layers.linear import qkv_linear
from penstock.layers.native import NativeMethod
from penstock.layers.quantization import DenseMethod, LinearMethod
from penstock.ops.registry import Ops


@pytest.mark.parametrize("method", [DenseMethod(), NativeMethod(), NativeMethod(int8=True)])
@pytest.mark.parametrize("bias", [False, True])
def test_the_last_parts_are_those_of_the_whole_layer(method: LinearMethod, bias: bool) -> None:
    torch.manual_seed(0)
    build = Build(torch.float32, torch.device("cpu"), 16, Ops("cpu"), linear_method=method)
    layer = qkv_linear(build, 64, num_heads=4, num_kv_heads=2, head_dim=32, bias=bias)
    for part, rows in layer.part_rows.items():
        layer.load("weight", part, torch.randn(rows, 64))
        if bias:
            layer.load("bias", part, torch.randn(rows))
    x = torch.randn(5, 64)
    assert torch.equal(layer.last_parts(x, "k_proj", "v_proj"), layer(x)[:, -2 * 2 * 32 :])
