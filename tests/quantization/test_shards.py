"""Ranks hold rows and columns of packed weights and of their scales: together, the whole matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import quantized_checkpoints as made
import torch
from test_formats import FORMATS

from penstock.distributed.mesh import Mesh, RankGroup
from penstock.layers.build import Build
from penstock.layers.linear import Linear, Part, column_linear, row_linear
from penstock.layers.native import NativeMethod
from penstock.layers.quantization import DeferredQuantization, LinearMethod, Shard
from penstock.layers.quantized.checkpoints import choose_quantization
from penstock.layers.quantized.linear import QuantizedMethod
from penstock.layers.quantized.native import NativeFinish
from penstock.layers.quantized.packed import GptqScheme, PackedScheme
from penstock.layers.quantized.weights import W4Weight
from penstock.loading.load import load_weights
from penstock.models.base import WeightTable
from penstock.ops.quantized import pack_nibbles
from penstock.ops.registry import Ops
from penstock.protocol.errors import ModelError

ROWS, COLUMNS = 256, 256


def load(
    make: Callable[[Build], Linear],
    weights: dict[str, torch.Tensor],
    writer: made.Writer,
    config: dict[str, Any],
    rank: int,
    ranks: int,
    native: bool = False,
) -> Linear:
    quantization = choose_quantization({"quantization_config": config}, None)
    assert quantization is not None
    build = Build(
        torch.float32,
        torch.device("cpu"),
        16,
        Ops("cpu"),
        Mesh(RankGroup(rank, ranks)),
        DeferredQuantization(),
    )
    model = torch.nn.Module()
    model.layer = make(build)
    tensors = {}
    present = {}
    for part, weight in weights.items():
        stored = made.as_layers_take_them(writer(weight)[0])
        present[part] = frozenset(stored)
        name = part or "layer"
        tensors |= {f"{name}.{key}": value for key, value in stored.items()}
    scheme = quantization.scheme("layer", "linear")
    assert scheme is not None
    finish = NativeFinish(NativeMethod()) if native else None
    method: LinearMethod = QuantizedMethod(scheme, present, finish)
    model.layer.use(method)
    # As a model's layers are: parts are siblings of the fused layer.
    load_weights(model, WeightTable(renamed={"^": ""}), _named(tensors), len(tensors), False)
    return model.layer


def _named(tensors: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return [(name if name.startswith("layer.") else f".{name}", t) for name, t in tensors.items()]


@pytest.mark.parametrize("name", [name for name in FORMATS if "static" not in name])
@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
def test_two_ranks_have_what_one_has(name: str, native: bool) -> None:
    config, writer = FORMATS[name][0]()
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, COLUMNS, generator=generator)
    weight = torch.randn(ROWS, COLUMNS, generator=generator) * 0.1
    other = torch.randn(ROWS // 2, COLUMNS, generator=generator) * 0.1
    parts = {"a": weight, "b": other}

    def columns(build: Build) -> Linear:
        return column_linear(build, COLUMNS, {"a": ROWS, "b": ROWS // 2})

    def rows(build: Build) -> Linear:
        return row_linear(build, COLUMNS, ROWS)

    def run(layer: Linear, inputs: torch.Tensor) -> torch.Tensor:
        return layer.method.apply(layer, inputs, None)

    whole = run(load(columns, parts, writer, config, 0, 1, native), x)
    halves = [run(load(columns, parts, writer, config, r, 2, native), x) for r in (0, 1)]
    a = torch.cat([half[:, : ROWS // 2] for half in halves], 1)
    b = torch.cat([half[:, ROWS // 2 :] for half in halves], 1)
    torch.testing.assert_close(torch.cat([a, b], 1), whole, atol=1e-4, rtol=1e-4)

    one = {"": weight}
    whole = run(load(rows, one, writer, config, 0, 1, native), x)
    shares = x.chunk(2, dim=1)
    total = sum(
        run(load(rows, one, writer, config, r, 2, native), shares[r].contiguous()) for r in (0, 1)
    )
    assert isinstance(total, torch.Tensor)
    # Each rank rounds its own activations by scales of its own.
    error = (total - whole).std() / whole.std()
    assert error < (0.05 if FORMATS[name][1] is not None else 1e-2 if native else 1e-5)


def test_a_shard_inside_a_group_is_refused() -> None:
    config, writer = made.gptq(group_size=128)
    with pytest.raises(ModelError, match="use fewer ranks"):
        load(
            lambda build: row_linear(build, 384, ROWS),
            {"": torch.randn(ROWS, 384)}, writer, config, 0, 2,
        )  # fmt: skip
    config, writer = made.fp8("block")
    with pytest.raises(ModelError, match="inside an fp8 block of 128"):
        load(
            lambda build: row_linear(build, 384, ROWS),
            {"": torch.randn(ROWS, 384)}, writer, config, 0, 2,
        )  # fmt: skip


def test_ranks_may_share_the_one_group_of_a_row() -> None:
    config, writer = made.gptq(group_size=128)
    weight, x = torch.randn(ROWS, 128), torch.randn(3, 128)
    outputs = []
    for rank, share in enumerate(x.chunk(2, dim=1)):
        layer = load(
            lambda build: row_linear(build, 128, ROWS), {"": weight}, writer, config, rank, 2
        )
        outputs.append(layer.method.apply(layer, share, None))
    expected = x @ writer(weight)[1].t()
    torch.testing.assert_close(outputs[0] + outputs[1], expected, atol=1e-4, rtol=1e-4)


def test_rows_that_do_not_divide_are_filled_up() -> None:
    config, writer = made.gptq()
    layer = load(
        lambda build: Linear(build, 64, [Part("", 64, 1)]),
        {"": torch.randn(64, 64)}, writer, config, 0, 1,
    )  # fmt: skip
    (weight,) = layer.quantized.fused
    padded = weight.padded(70)
    floats = padded.floats(torch.arange(70))
    assert not floats[64:].any()
    assert torch.equal(floats[:64], weight.floats(torch.arange(64)))


def test_zero_points_of_the_first_gptq_format_may_be_zero() -> None:
    """Writers subtract one from all numbers of a word at once: a 0 borrows from the next."""
    zeros = torch.tensor([[0, 8, 15, 0, 0, 3, 1, 7]])  # [groups, out]
    words = sum(int(zero) << (4 * place) for place, zero in enumerate(zeros[0]))
    stored = torch.tensor([[(words - 0x11111111) % 2**32]]).to(torch.uint32).view(torch.int32)
    tensors = {
        "qweight": torch.zeros(1, 8, dtype=torch.int32),
        "qzeros": stored,
        "scales": torch.ones(1, 8),
    }
    scheme = GptqScheme(4, 8)
    weight = scheme.convert(tensors, Shard((8, 8), 0, 8, 0, 8))
    assert torch.equal(weight.floats(torch.arange(8))[:, 0], -zeros[0].float())


def test_compressed_tensors_may_have_columns_in_activation_order() -> None:
    """Each column's group is named, as in GPTQ; the package no longer writes it."""
    config, writer = made.gptq(symmetric=False, act_order=True)
    weight = torch.randn(64, 128)
    stored, meant = writer(weight)
    quantization = choose_quantization({"quantization_config": config}, None)
    assert quantization is not None
    shard = Shard((64, 128), 0, 64, 0, 128)
    gptq = quantization.scheme("", "linear")
    assert gptq is not None
    numbers = gptq.convert(
        {**stored, "g_idx": torch.arange(128) // 32}, shard
    )  # as they are stored
    assert isinstance(numbers, W4Weight)
    assert numbers.zeros is not None
    zeros = pack_nibbles(numbers.zeros.t().contiguous()).view(torch.int32).t()
    scheme = PackedScheme(4, 32, has_zeros=True, act_order=True)
    ordered = scheme.convert(
        {
            "weight_packed": numbers.packed.view(torch.int32),
            "weight_scale": numbers.scales,
            "weight_zero_point": zeros,
            "weight_g_idx": stored["g_idx"],
        },
        shard,
    )
    x = torch.randn(3, 128)
    output = ordered.linear(Ops("cpu"), x, None)
    torch.testing.assert_close(output, x @ meant.t(), atol=1e-3, rtol=1e-3)
