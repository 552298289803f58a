"""LoRA in the C++ library: the formula, and the same bits for a row whatever is beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ops.cpu import library
from penstock.ops.cpu.lora import NativeLoraSlots
from penstock.ops.lora import AdapterStep, PartUpdate, Update, adapter_step

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_update(
    generator: torch.Generator,
    ranks: list[int],  # of each part; 0: the part is left alone
    in_features: int,
    part_rows: list[int],
    dtype: torch.dtype = torch.float32,
    has_vectors: bool = False,
) -> Update:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return [
        None
        if rank == 0
        else PartUpdate(
            draw(rank, in_features).to(dtype),
            draw(rank, rows).to(dtype),
            draw(rows) if has_vectors else None,
            draw(rows) if has_vectors else None,
        )
        for rank, rows in zip(ranks, part_rows, strict=True)
    ]


def expected_row(x: torch.Tensor, y: torch.Tensor, update: Update, rows: list[int]) -> torch.Tensor:
    """The formula in float64."""
    parts = []
    for own, part in zip(y.double().split(rows), update or [None] * len(rows), strict=True):
        if part is not None:
            own = own + x.double() @ part.a.double().T @ part.b.double()
            own = own if part.multiplier is None else own * part.multiplier
            own = own if part.shift is None else own + part.shift
        parts.append(own)
    return torch.cat(parts)


@settings(max_examples=60)
@given(
    slots=st.lists(st.integers(-1, 3), min_size=1, max_size=70),
    ranks=st.lists(
        st.lists(st.sampled_from([0, 1, 2, 3, 8, 17, 64]), min_size=2, max_size=2),
        min_size=3,
        max_size=3,
    ),
    in_features=st.sampled_from([1, 7, 16, 65, 130]),
    part_rows=st.lists(st.sampled_from([1, 5, 16, 33, 300]), min_size=2, max_size=2),
    dtype=st.sampled_from(DTYPES),
    has_vectors=st.booleans(),
)
def test_every_row_gets_its_adapters_formula(
    isa: str,
    slots: list[int],
    ranks: list[list[int]],
    in_features: int,
    part_rows: list[int],
    dtype: torch.dtype,
    has_vectors: bool,
) -> None:
    generator = torch.Generator().manual_seed(len(slots))
    layer = NativeLoraSlots(4, in_features, part_rows, 64, dtype, CPU)
    updates: list[Update] = [
        random_update(generator, own, in_features, part_rows, dtype, has_vectors) for own in ranks
    ]
    updates.append(())  # slot 3 has an adapter that leaves the layer alone
    for slot, update in enumerate(updates):
        layer.place(slot, update)
    x = torch.randn(len(slots), in_features, generator=generator)
    y = torch.randn(len(slots), sum(part_rows), generator=generator)
    output = layer.add(x, y.clone(), adapter_step(np.array(slots), 4))
    alone = adapter_step(np.array([0]), 4)
    for row, slot in enumerate(slots):
        if slot < 0:
            assert torch.equal(output[row], y[row])
            continue
        wanted = expected_row(x[row], y[row], updates[slot], part_rows)
        torch.testing.assert_close(output[row].double(), wanted, rtol=1e-4, atol=1e-3)
        # The same bits where the row is alone, and its adapter in another slot.
        single = NativeLoraSlots(4, in_features, part_rows, 64, dtype, CPU)
        single.place(0, updates[slot])
        assert torch.equal(single.add(x[row : row + 1], y[row : row + 1].clone(), alone)[0],
                           output[row])  # fmt: skip


@pytest.mark.parametrize("num_rows", [1, 16, 300])
def test_the_number_of_threads_changes_no_bit(
    isa: str, generator: torch.Generator, num_rows: int
) -> None:
    loaded = library.load()
    assert loaded is not None
    part_rows = [300, 77]
    layer = NativeLoraSlots(2, 576, part_rows, 64, torch.float32, CPU)
    for slot, ranks in enumerate(([16, 16], [0, 9])):
        layer.place(slot, random_update(generator, ranks, 576, part_rows))
    x = torch.randn(num_rows, 576, generator=generator)
    y = torch.randn(num_rows, 377, generator=generator)
    slots = torch.randint(-1, 2, (num_rows,), generator=generator).numpy()
    step = adapter_step(slots, 2)
    outputs = []
    for threads in (1, 2, 3):
        loaded.penstock_set_threads(threads)
        outputs.append(layer.add(x, y.clone(), step))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_rows_may_lie_apart(isa: str, generator: torch.Generator) -> None:
    layer = NativeLoraSlots(1, 20, [9], 8, torch.float32, CPU)
    layer.place(0, random_update(generator, [3], 20, [9]))
    wide_x = torch.randn(5, 40, generator=generator)
    wide_y = torch.randn(5, 30, generator=generator)
    step = adapter_step(np.array([0, -1, 0, 0, -1]), 1)
    expected = layer.add(wide_x[:, 3:23].contiguous(), wide_y[:, 8:17].contiguous(), step)
    before = wide_y.clone()
    assert torch.equal(layer.add(wide_x[:, 3:23], wide_y[:, 8:17], step), expected)
    assert torch.equal(wide_y[:, :8], before[:, :8])
    assert torch.equal(wide_y[:, 17:], before[:, 17:])


def test_an_adapter_may_consist_of_vectors_alone(isa: str, generator: torch.Generator) -> None:
    layer = NativeLoraSlots(1, 20, [9], 8, torch.float32, CPU)
    shift = torch.randn(9, generator=generator)
    nothing = PartUpdate(torch.empty(0, 20), torch.empty(0, 9), shift=shift)
    layer.place(0, [nothing])
    y = torch.randn(2, 9, generator=generator)
    output = layer.add(torch.zeros(2, 20), y.clone(), adapter_step(np.array([-1, 0]), 1))
    assert torch.equal(output[0], y[0])
    assert torch.equal(output[1], y[1] + shift)


def test_rows_that_are_not_there_are_refused(isa: str) -> None:
    layer = NativeLoraSlots(1, 4, [4], 8, torch.float32, CPU)
    x, y = torch.zeros(2, 4), torch.zeros(2, 4)
    slots = torch.zeros(2, dtype=torch.int32)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    for rows in ([2], [-1]):
        step = AdapterStep(slots, torch.tensor(rows, dtype=torch.int32), starts)
        with pytest.raises(IndexError):
            layer.add(x, y, step)
    with pytest.raises(ValueError, match="2 rows, but x"):
        layer.add(x[:1], y, AdapterStep(slots, starts, starts))


def test_other_types_are_computed_by_the_reference(generator: torch.Generator) -> None:
    layer = NativeLoraSlots(1, 20, [9], 8, torch.float32, CPU)
    layer.place(0, random_update(generator, [3], 20, [9]))
    x, y = torch.randn(2, 20, generator=generator), torch.randn(2, 9, generator=generator)
    step = adapter_step(np.array([0, -1]), 1)
    half = layer.add(x.bfloat16(), y.bfloat16(), step)
    assert half.dtype == torch.bfloat16
    expected = layer.add(x, y.clone(), step)
    torch.testing.assert_close(half.float(), expected, rtol=0.1, atol=0.1)
