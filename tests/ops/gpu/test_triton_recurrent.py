"""The kernels for single tokens, against the recurrence; longer queries go through as well."""

from __future__ import annotations

import pytest
import torch
from recurrent_steps import Conv, Delta, Layer, Mamba, Steps

pytest.importorskip("triton", reason="needs Triton")

from penstock.ops.triton import recurrent

LAYERS = {
    "conv": Conv,
    "mamba": Mamba,
    "mamba_larger": lambda: Mamba(heads=6, groups=1, head_dim=40, state_size=128),
    "delta": Delta,
    "delta_larger": lambda: Delta(key_heads=1, heads=2, key_dim=96, value_dim=72),
}


@pytest.mark.parametrize("name", LAYERS)
def test_single_tokens_beside_longer_queries(device: torch.device, name: str) -> None:
    torch.manual_seed(0)
    layer: Layer = LAYERS[name]()
    steps = Steps(layer, [12, 9, 7], 4, recurrent, device)
    steps.run({0: 6, 1: 1, 2: 3})
    for _ in range(4):
        steps.run({0: 1, 1: 1, 2: 1})
    steps.run({0: 1, 1: 4})
    steps.run({0: 1})
    steps.check()


SIZES = [(name, 3) for name in LAYERS]
LONG = [(name, size) for name in LAYERS for size in (1, 16)]


@pytest.mark.parametrize(
    ("name", "block_size"),
    [*SIZES, *(pytest.param(*each, marks=pytest.mark.slow) for each in LONG)],
)
def test_drafts_beside_longer_queries(device: torch.device, name: str, block_size: int) -> None:
    layer: Layer = LAYERS[name]()
    steps = Steps(layer, [30, 22, 17, 12], block_size, recurrent, device)
    steps.run({0: 6, 1: 1, 2: 3})
    steps.run({0: 4, 1: 1, 2: 2, 3: 5}, wrong={0: 2, 2: 0})
    for round_ in range(3):
        shared = steps.full_blocks()
        before = steps.states[shared]
        steps.run({0: 5, 1: 1 + round_, 2: 1}, wrong={0: 0, 1: 3, 2: 5})
        assert torch.equal(steps.states[shared], before)
    steps.run({1: 1, 3: 1}, wrong={1: 1})
    steps.check()


@pytest.mark.parametrize("name", ["conv", "mamba", "delta"])
def test_padded_drafts_give_zeros_for_padding_and_write_no_block_of_anybody(
    device: torch.device, name: str
) -> None:
    steps = Steps(LAYERS[name](), [20, 12, 3], 4, recurrent, device)
    steps.run({0: 8, 1: 3})
    own = steps.table[0, :2].long()
    before = steps.states[own]
    steps.run({0: 3, 1: 1, 2: 1}, num_padding=3, wrong={0: 2, 1: 1}, padded=True)
    assert (steps.padding == 0).all()
    assert torch.equal(steps.states[own], before)
    steps.run({0: 1, 1: 5, 2: 1}, num_padding=1, wrong={0: 4}, padded=True)
    steps.check()


@pytest.mark.parametrize("name", ["conv", "mamba", "delta"])
def test_padding_gives_zeros_and_writes_nothing(device: torch.device, name: str) -> None:
    torch.manual_seed(1)
    steps = Steps(LAYERS[name](), [8, 3], 4, recurrent, device)
    steps.run({0: 8})
    before = steps.states.clone()
    steps.run({1: 1}, num_padding=2)
    assert (steps.padding == 0).all()
    changed = (steps.states != before) & ~(steps.states.isnan() & before.isnan())
    assert changed.flatten(1).any(1).nonzero().flatten().tolist() == [int(steps.table[1, 0])]
    steps.check()


def test_a_small_time_step_is_exact(device: torch.device) -> None:
    torch.manual_seed(2)
    layer = Mamba()
    layer.dt_bias = torch.full((4,), -12.0)
    steps = Steps(layer, [6], 4, recurrent, device)
    for _ in range(6):
        steps.run({0: 1})
    _, states = layer.naive(steps.inputs[0])
    block = int(steps.table[0, 1])
    torch.testing.assert_close(steps.states[block].cpu().double(), states[5], rtol=1e-4, atol=1e-9)
