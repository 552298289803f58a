"""LoRA kernels against the torch reference."""

from __future__ import annotations

from dataclasses import astuple
from typing import NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from penstock.ops.lora import EmbeddingSlots, LoraSlots, PartUpdate, Update, adapter_step
from penstock.ops.triton import lora
from penstock.ops.triton.lora_tiles import DeviceAdapterStep

IN = 200  # no multiple of a tile


def group(slots: torch.Tensor, num_slots: int) -> DeviceAdapterStep:
    return DeviceAdapterStep.empty(slots, num_slots).group()


class Layer(NamedTuple):
    ours: lora.DeviceLoraSlots
    theirs: LoraSlots  # on the host

    def place(self, slot: int, update: Update) -> None:
        self.ours.place(slot, update)
        self.theirs.place(slot, on_host(update))


def on_host(update: Update) -> Update:
    return [
        None
        if part is None
        else PartUpdate(*(None if own is None else own.cpu() for own in astuple(part)))
        for part in update
    ]


def make_layer(
    device: torch.device,
    parts: tuple[int, ...],
    num_slots: int = 3,
    max_rank: int = 8,
    dtype: torch.dtype = torch.float32,
) -> Layer:
    sizes = (num_slots, IN, parts, max_rank, dtype)
    return Layer(lora.lora_slots(*sizes, device), LoraSlots(*sizes, torch.device("cpu")))


def make_part(
    device: torch.device,
    rank: int,
    out: int,
    dtype: torch.dtype = torch.float32,
    dora: bool = False,
) -> PartUpdate:
    return PartUpdate(
        torch.randn(rank, IN, device=device).to(dtype) / 8,
        torch.randn(rank, out, device=device).to(dtype),
        torch.rand(out, device=device) + 0.5 if dora else None,
        torch.randn(out, device=device) if dora else None,
    )


def check(layer: Layer, slots: list[int], device: torch.device, tolerance: float = 1e-4) -> None:
    dtype = layer.ours.a.dtype
    n, out = len(slots), layer.ours.out_features
    x = torch.randn(n, IN + 24, device=device).to(dtype)[:, :IN]  # rows that lie apart
    output = torch.randn(n, out, device=device).to(dtype)
    host = adapter_step(np.array(slots), layer.ours.num_slots)
    expected = layer.theirs.add(x.cpu(), output.cpu().clone(), host)
    rows = torch.tensor(slots, dtype=torch.int32, device=device)
    step = group(rows, layer.ours.num_slots)
    got = layer.ours.add(x, output, step)
    assert got is output, "in place"
    torch.testing.assert_close(got.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("n", [1, 5, 40, 300, 700])
@pytest.mark.parametrize("num_slots", [1, 3, 8])
def test_rows_are_grouped_by_slot_in_their_order(
    device: torch.device, n: int, num_slots: int
) -> None:
    slots = torch.randint(-1, num_slots, (n,), dtype=torch.int32, device=device)
    step = group(slots, num_slots)
    expected = adapter_step(slots.cpu().numpy().astype(np.int64), num_slots)
    used = int(expected.starts[-1])
    assert step.starts.tolist() == expected.starts.tolist()
    assert step.rows[:used].tolist() == expected.rows.tolist()
    found: list[tuple[int, int]] = []
    for slot, first, count in step.tiles.T.tolist():
        assert 0 <= count <= step.tile_rows
        found += [(slot, row) for row in step.rows[first : first + count].tolist() if count]
    assert found == [(int(slots[row]), row) for row in expected.rows.tolist()]


@pytest.mark.parametrize("parts", [(96,), (64, 40, 40), (7, 130)])
@pytest.mark.parametrize("n", [1, 6, 150])
def test_fused_parts_get_their_own_matrices(
    device: torch.device, parts: tuple[int, ...], n: int
) -> None:
    layer = make_layer(device, parts)
    for slot in range(3):
        layer.place(slot, [make_part(device, 8, size) for size in parts])
    check(layer, [(5 * row) % 4 - 1 for row in range(n)] if n > 1 else [2], device)


@pytest.mark.parametrize("rank", [1, 8, 20, 64, 150])
def test_any_rank_up_to_the_largest(device: torch.device, rank: int) -> None:
    layer = make_layer(device, (48,), max_rank=150 if rank > 64 else 64)
    layer.place(1, [make_part(device, rank, 48)])
    check(layer, [1, -1, 1, 1], device)


def test_a_part_alone_leaves_the_others_as_they_are(device: torch.device) -> None:
    layer = make_layer(device, (32, 32, 32))
    layer.place(0, [None, make_part(device, 4, 32), None])
    layer.place(1, [make_part(device, 2, 32), None, make_part(device, 8, 32)])
    check(layer, [0, 1, 1, 0, -1], device)


def test_a_slot_may_be_reused_by_a_smaller_adapter_or_none(device: torch.device) -> None:
    layer = make_layer(device, (32, 32))
    layer.place(0, [make_part(device, 8, 32, dora=True), make_part(device, 8, 32)])
    layer.place(1, [make_part(device, 8, 32), make_part(device, 8, 32)])
    layer.place(0, [None, make_part(device, 2, 32)])
    check(layer, [0, 1, 0], device)
    layer.place(0, ())
    check(layer, [0, 1, 0], device)


def test_multipliers_and_shifts_follow_the_sum(device: torch.device) -> None:
    layer = make_layer(device, (40, 24))
    layer.place(0, [make_part(device, 8, 40, dora=True), make_part(device, 8, 24)])
    layer.place(2, [None, make_part(device, 3, 24, dora=True)])
    check(layer, [2, 0, -1, 2, 0, 1], device)


def test_half_precision_accumulates_in_float32(device: torch.device) -> None:
    layer = make_layer(device, (64, 64), dtype=torch.float16)
    for slot in range(3):
        parts = [make_part(device, 8, 64, torch.float16) for _ in range(2)]
        layer.place(slot, parts)
    check(layer, [0, 1, 2, -1, 1], device, tolerance=2e-2)


def test_a_row_does_not_depend_on_the_slot_of_its_adapter(device: torch.device) -> None:
    layer = make_layer(device, (48,))
    parts = [[make_part(device, 8, 48)] for _ in range(3)]
    x, output = torch.randn(9, IN, device=device), torch.randn(9, 48, device=device)
    results = []
    for order in ([0, 1, 2], [2, 0, 1]):
        for adapter, slot in enumerate(order):
            layer.ours.place(slot, parts[adapter])
        slots = torch.tensor([order[row % 3] for row in range(9)], dtype=torch.int32, device=device)
        results.append(layer.ours.add(x, output.clone(), group(slots, 3)))
    assert torch.equal(*results)


def test_some_rows_of_a_step_are_grouped_anew(device: torch.device) -> None:
    slots = torch.tensor([1, -1, 0, 1, 2], dtype=torch.int32, device=device)
    step = group(slots, 3)
    assert step.take(slice(0, 5)) is step
    some = step.take(torch.tensor([4, 0, 1], device=device))
    assert some.starts.tolist() == [0, 0, 1, 2]
    assert some.rows[:2].tolist() == [1, 0]


def test_embedded_tokens_get_their_adapters_rows(device: torch.device) -> None:
    vocab, hidden = 50, 72
    sizes = (vocab, [hidden], 8, torch.float32)
    ours = lora.embedding_slots(3, *sizes, device)
    theirs = EmbeddingSlots(3, *sizes, torch.device("cpu"))
    for slot, rank in ((0, 8), (2, 3)):
        multiplier = torch.rand(hidden, device=device) if slot else None
        update = [
            PartUpdate(
                torch.randn(vocab, rank, device=device),
                torch.randn(rank, hidden, device=device),
                multiplier,
            )
        ]
        ours.place(slot, update)
        theirs.place(slot, on_host(update))
    tokens = torch.randint(0, vocab, (40,), dtype=torch.int32, device=device)
    slots = [row % 4 - 1 for row in range(40)]
    output = torch.randn(40, hidden, device=device)
    host = adapter_step(np.array(slots), 3)
    expected = theirs.add(tokens.cpu(), output.cpu().clone(), host)
    rows = torch.tensor(slots, dtype=torch.int32, device=device)
    got = ours.add(tokens, output, group(rows, 3))
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=1e-5)
    ours.place(0, ())
    assert torch.equal(ours.add(tokens, output.clone(), group(rows * 0, 3)), output)


def join(
    layer: Layer, device: torch.device, has_bias: bool = False
) -> tuple[torch.nn.Parameter, torch.nn.Parameter | None]:
    """Put the slots behind a random matrix. Returns it and its bias."""
    dtype, out = layer.ours.a.dtype, layer.ours.out_features
    weight = torch.nn.Parameter(torch.randn(out, IN, device=device).to(dtype) / 8, False)
    bias = torch.nn.Parameter(torch.randn(out, device=device).to(dtype), False)
    layer.ours.join(weight, bias if has_bias else None)
    return weight, bias if has_bias else None


@pytest.mark.parametrize("n", [1, 6, 256, 257])
@pytest.mark.parametrize("has_bias", [False, True])
def test_slots_behind_the_layers_matrix_give_the_same_output(
    device: torch.device, n: int, has_bias: bool
) -> None:
    layer = make_layer(device, (64, 40, 40))
    layer.place(0, [make_part(device, 8, size, dora=True) for size in (64, 40, 40)])
    before = layer.ours.a.clone()
    weight, bias = join(layer, device, has_bias)
    assert torch.equal(layer.ours.a, before), "adapters that are there stay"
    layer.place(1, [make_part(device, 3, 64), None, make_part(device, 2, 40)])
    layer.place(2, [make_part(device, 8, size) for size in (64, 40, 40)])
    layer.place(2, [None, make_part(device, 1, 40), None])  # what was there is not read
    x = torch.randn(n, IN, device=device)
    slots = [(5 * row) % 4 - 1 for row in range(n)] if n > 1 else [1]
    output = torch.nn.functional.linear(x, weight, bias)
    host = adapter_step(np.array(slots), 3)
    expected = layer.theirs.add(x.cpu(), output.cpu(), host)
    step = group(torch.tensor(slots, dtype=torch.int32, device=device), 3)
    got = layer.ours.run(x, lambda x: torch.nn.functional.linear(x, weight, bias), step)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_a_matrix_keeps_its_values_and_its_layout_when_slots_come_behind_it(
    device: torch.device,
) -> None:
    layer = make_layer(device, (48,))
    weight = torch.nn.Parameter(torch.randn(48, IN, device=device), False)
    values, place = weight.detach().clone(), weight.data_ptr()
    layer.ours.join(weight, None)
    assert weight.data_ptr() != place
    assert torch.equal(weight, values)
    assert weight.is_contiguous()


def test_slots_of_another_type_or_too_many_stay_apart(device: torch.device) -> None:
    for layer in (
        make_layer(device, (48,), dtype=torch.float16),
        make_layer(device, (48,), num_slots=64, max_rank=256),
    ):
        weight = torch.nn.Parameter(torch.randn(48, IN, device=device), False)
        place = weight.data_ptr()
        layer.ours.join(weight, None)
        assert weight.data_ptr() == place


def test_a_few_rows_take_one_launch_beside_the_layers_product(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(device, (48,))
    weight, _ = join(layer, device)
    layer.place(0, [make_part(device, 8, 48)])
    monkeypatch.setattr(layer.ours, "_shrink", None)
    step = group(torch.zeros(5, dtype=torch.int32, device=device), 3)
    output = layer.ours.run(torch.randn(5, IN, device=device), lambda x: x @ weight.T, step)
    assert output.shape == (5, 48)
