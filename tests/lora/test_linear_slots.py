"""Adapters of linear layers: every storage, every shard, parts alone, DoRA and biases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.distributed.mesh import Mesh, RankGroup
from penstock.layers.build import Build
from penstock.layers.context import ForwardContext, forward_context
from penstock.layers.linear import Linear, Part, column_linear, qkv_linear
from penstock.layers.lora import AdapterWeights, LinearSlots, PartDelta, make_slots
from penstock.layers.native import NativeMethod
from penstock.layers.quantization import DenseMethod, LinearMethod
from penstock.ops.lora import adapter_step
from penstock.ops.registry import Ops

METHODS: list[tuple[str, LinearMethod]] = [
    ("cpu", DenseMethod()),
    ("cpu-native", NativeMethod()),
    ("cpu-native", NativeMethod(int8=True)),
]
SLOTS = [1, -1, 0, 1, -1, 1, 0]  # of the rows


class Opaque(DenseMethod):
    """A method whose weights are known only by multiplying with them."""

    floats = LinearMethod.floats


def make_build(backend: str = "cpu", method: LinearMethod | None = None) -> Build:
    method = method or DenseMethod()
    return Build(torch.float32, torch.device("cpu"), 64, Ops(backend), linear_method=method)


def random_delta(
    out_features: int, in_features: int, rank: int, *, dora: bool = False, bias: bool = False
) -> PartDelta:
    return PartDelta(
        torch.randn(rank, in_features),
        torch.randn(out_features, rank),
        torch.rand(out_features) + 0.5 if dora else None,
        torch.randn(out_features) if bias else None,
    )


def merged(weight: torch.Tensor, delta: PartDelta | None) -> torch.Tensor:
    """The matrix with the adapter merged into it, as peft does."""
    if delta is None:
        return weight
    whole = weight + delta.b @ delta.a
    if delta.magnitude is not None:
        whole *= (delta.magnitude / whole.norm(dim=1))[:, None]
    return whole


def run(layer: Linear, x: torch.Tensor, slots: list[int], num_slots: int = 2) -> torch.Tensor:
    """The layer's output in a step whose rows have these adapter slots."""
    step = adapter_step(np.array(slots), num_slots)
    rows = torch.zeros(len(x), dtype=torch.int64)
    context = ForwardContext({}, {}, torch.tensor([0, len(x)]), rows, adapters=step)
    with forward_context(context), torch.inference_mode():
        output: torch.Tensor = layer(x)
    return output


def place(slots: LinearSlots, slot: int, deltas: dict[str, PartDelta]) -> None:
    rank = max((delta.a.shape[0] for delta in deltas.values()), default=1)
    weights = AdapterWeights(rank, {(slots.name, part): delta for part, delta in deltas.items()})
    slots.place(slot, slots.prepare(weights))


def slots_of(layer: Linear, num_slots: int = 2) -> LinearSlots:
    (slots,) = make_slots(layer, num_slots, 16, torch.float32).values()
    assert isinstance(slots, LinearSlots)
    return slots


@pytest.mark.parametrize(("backend", "method"), [*METHODS, ("cpu", Opaque())])
@pytest.mark.parametrize("dora", [False, True])
def test_rows_get_their_own_adapters_merged_matrix(
    backend: str, method: LinearMethod, dora: bool
) -> None:
    torch.manual_seed(3)
    sizes = {"q_proj": 48, "k_proj": 16, "v_proj": 16}
    layer = column_linear(make_build(backend, method), 64, sizes, bias=True)
    bias = {part: torch.randn(rows) for part, rows in sizes.items()}
    for part, rows in sizes.items():
        layer.load("weight", part, torch.randn(rows, 64))
        layer.load("bias", part, bias[part])
    with torch.inference_mode():
        weight = {part: layer.method.floats(layer, part) for part in sizes}
    adapters = [
        {part: random_delta(rows, 64, 5, dora=dora, bias=True) for part, rows in sizes.items()},
        {"v_proj": random_delta(16, 64, 2, dora=dora)},
    ]
    slots = slots_of(layer)
    for slot, deltas in enumerate(adapters):
        place(slots, slot, deltas)
    x = torch.randn(len(SLOTS), 64)
    output = run(layer, x, SLOTS)
    base = run(layer, x, [-1] * len(SLOTS))
    for row, slot in enumerate(SLOTS):
        if slot < 0:
            assert torch.equal(output[row], base[row])
            continue
        expected = []
        for part in sizes:
            delta = adapters[slot].get(part)
            added = 0 if delta is None or delta.bias is None else delta.bias
            expected.append(merged(weight[part], delta) @ x[row] + bias[part] + added)
        # 8-bit activations of the base differ from floats in the third digit.
        tolerance = 2e-2 if getattr(method, "int8", False) else 1e-5
        torch.testing.assert_close(
            output[row], torch.cat(expected), rtol=tolerance, atol=20 * tolerance
        )


@pytest.mark.parametrize("dora", [False, True])
def test_shards_by_rows_make_up_the_whole(dora: bool) -> None:
    torch.manual_seed(4)
    # One KV head of two ranks: both hold it.
    shape = {"hidden_size": 24, "num_heads": 4, "num_kv_heads": 1, "head_dim": 8, "bias": True}
    rows = {"q_proj": 32, "k_proj": 8, "v_proj": 8}
    tensors = {part: (torch.randn(count, 24), torch.randn(count)) for part, count in rows.items()}
    deltas = {
        part: random_delta(count, 24, 4, dora=dora, bias=True) for part, count in rows.items()
    }
    x = torch.randn(5, 24)
    outputs = []
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        build = replace(make_build(), mesh=Mesh(RankGroup(rank, size)))
        layer = qkv_linear(build, **shape)  # type: ignore[arg-type]
        for part, (weight, bias) in tensors.items():
            layer.load("weight", part, weight)
            layer.load("bias", part, bias)
        place(slots_of(layer), 1, deltas)
        outputs.append(run(layer, x, [1, -1, 1, -1, 1]))
    whole, first, second = outputs
    query = torch.cat([first[:, :16], second[:, :16]], dim=1)
    torch.testing.assert_close(query, whole[:, :32])
    for shard in (first, second):
        torch.testing.assert_close(shard[:, 16:], whole[:, 32:])


class AddingRank(RankGroup):
    """A rank whose sums add what the test says that the other rank has."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, 2)
        self.__dict__["other"] = torch.zeros(())

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = x + self.__dict__["other"]
        return total


@pytest.mark.parametrize("dora", [False, True])
def test_shards_by_columns_sum_to_the_whole(dora: bool) -> None:
    torch.manual_seed(5)
    weight, bias = torch.randn(12, 16), torch.randn(12)
    weights = AdapterWeights(4, {("", ""): random_delta(12, 16, 4, dora=dora, bias=True)})
    x, rows = torch.randn(3, 16), [0, -1, 0]
    whole, *ranks = [RankGroup(), AddingRank(0), AddingRank(1)]
    layers, shares = [], []
    for group in (whole, *ranks):
        build = replace(make_build(), mesh=Mesh(group))
        layer = Linear(build, 16, [Part("", 12, 1)], bias=True, split_input=True)
        layer.load("weight", "", weight)
        layer.load("bias", "", bias)
        layers.append(layer)
        shares.append(slots_of(layer).prepare(weights))
    norms = [share[0].squared_norms for share in shares[1:] if share and share[0]]
    for rank, group in enumerate(ranks):
        if dora:
            group.__dict__["other"] = norms[1 - rank]
        layers[1 + rank].adapter.place(0, shares[1 + rank])  # type: ignore[union-attr]
        group.__dict__["other"] = torch.zeros(())
    layers[0].adapter.place(0, shares[0])  # type: ignore[union-attr]
    ranks[1].__dict__["other"] = run(layers[1], x[:, :8].contiguous(), rows)
    output = run(layers[2], x[:, 8:].contiguous(), rows)
    torch.testing.assert_close(output, run(layers[0], x, rows), rtol=1e-4, atol=1e-4)


def test_a_slot_can_be_emptied_and_filled_again() -> None:
    torch.manual_seed(6)
    layer = column_linear(make_build(), 8, {"": 4})
    layer.load("weight", "", torch.randn(4, 8))
    slots, x = slots_of(layer), torch.randn(2, 8)
    base = run(layer, x, [-1, -1])
    place(slots, 0, {"": random_delta(4, 8, 3)})
    assert not torch.equal(run(layer, x, [0, -1])[0], base[0])
    place(slots, 0, {})
    assert torch.equal(run(layer, x, [0, 0]), base)


def test_a_matrix_that_is_used_elsewhere_takes_no_adapters() -> None:
    layer = column_linear(make_build(), 8, {"": 4})
    layer.takes_adapters = False
    assert make_slots(layer, 2, 16, torch.float32) == {}
