"""Mixtures of experts with quantized weights: expert by expert, and stacked as GPUs have them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
import quantized_checkpoints as made
import torch
from test_formats import EXACT, FORMATS, own_logits, reference_logits, relative_error

from penstock.distributed.mesh import Mesh, RankGroup
from penstock.layers.build import Build
from penstock.layers.experts import (
    DeferredExperts,
    Experts,
    ExpertsConfig,
    ExpertWeights,
    StackedExperts,
)
from penstock.layers.quantization import DeferredQuantization, DenseMethod
from penstock.layers.quantized.checkpoints import choose_quantization
from penstock.layers.quantized.dummy import fill_quantized
from penstock.layers.quantized.experts import QuantizedExperts
from penstock.layers.quantized.plan import StoredLayers, assign_methods
from penstock.ops import reference
from penstock.ops.experts import ACTIVATIONS, Routing, run_by_expert
from penstock.ops.registry import Ops
from penstock.protocol.errors import ModelError

CONFIG = ExpertsConfig(4, 256, 128, Routing(2), bias=True)
STACKED = [name for name in FORMATS if "act-order" not in name]


def build_for(rank: int = 0, ranks: int = 1) -> Build:
    mesh = Mesh(RankGroup(rank, ranks))
    return Build(torch.float32, torch.device("cpu"), 16, Ops("cpu"), mesh, DeferredQuantization())


def random_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for expert in range(CONFIG.num_experts):
        for name, rows, columns in (
            ("gate_proj", 128, 256), ("up_proj", 128, 256), ("down_proj", 256, 128)
        ):  # fmt: skip
            part = f"experts.{expert}.{name}"
            weights[f"{part}.weight"] = torch.randn(rows, columns, generator=generator) * 0.1
            weights[f"{part}.bias"] = torch.randn(rows, generator=generator)
    return weights


def load_stacked(
    name: str, rank: int = 0, ranks: int = 1, unseen: Collection[int] = ()
) -> tuple[QuantizedExperts, StackedExperts]:
    """The experts of one rank, and those of the floats that they stand for, whole.

    Those that are `unseen` have a static scale of 0.
    """
    config, writer = FORMATS[name][0]()
    quantization = choose_quantization({"quantization_config": config}, None)
    assert quantization is not None
    scheme = quantization.scheme("experts", "linear")
    assert scheme is not None
    floats = StackedExperts(build_for(), CONFIG, reference.experts)
    stored = {}
    for tensor_name, tensor in random_weights().items():
        part, _, parameter = tensor_name.rpartition(".")
        meant = tensor
        if parameter == "weight":
            written, meant = writer(tensor)
            stored[part] = made.as_layers_take_them(written)
            if int(part.split(".")[1]) in unseen:
                stored[part]["input_scale"].zero_()
        else:
            stored[part]["bias"] = tensor
        floats.load(parameter, part, meant)
    present = {part: frozenset(tensors) for part, tensors in stored.items()}
    experts = QuantizedExperts(build_for(rank, ranks), CONFIG, scheme, present)
    for (parameter, part), expected in experts.expected().items():
        shape = expected if isinstance(expected, tuple) else expected.shape
        experts.load(parameter, part, stored[part][parameter].reshape(shape))
    experts.finish_loading()
    return experts, floats


def by_single_matmuls(
    experts: ExpertWeights, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """As rows with an adapter are computed."""

    def run(expert: int, rows: torch.Tensor) -> torch.Tensor:
        both = experts.linear(expert, "gate_up", rows) + experts.bias(expert, "gate_up")
        activated = ACTIVATIONS[CONFIG.activation](*both.chunk(2, dim=-1))
        return experts.linear(expert, "down", activated) + experts.bias(expert, "down")

    return run_by_expert(x, weights, ids, CONFIG.num_experts, run)


@pytest.mark.parametrize("name", STACKED)
def test_an_experts_tensors_are_all_of_it(name: str) -> None:
    """As another rank's copy gets them."""
    experts, _ = load_stacked(name)
    x, weights = torch.randn(3, CONFIG.hidden_size), torch.ones(3, 1)
    for own, other in zip(experts.tensors_of(0), experts.tensors_of(2), strict=True):
        own.copy_(other)
    first, third = (experts(x, weights, torch.full((3, 1), expert)) for expert in (0, 2))
    assert torch.equal(first, third)


@pytest.mark.parametrize("name", STACKED)
def test_stacked_experts_compute_what_their_floats_do(name: str) -> None:
    experts, floats = load_stacked(name)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, CONFIG.hidden_size, generator=generator)
    ids = torch.randint(0, CONFIG.num_experts, (9, 2), generator=generator)
    weights = torch.rand(9, 2, generator=generator)
    whole = experts(x, weights, ids)
    expected = floats(x, weights, ids)
    error = float((whole - expected).std() / expected.std())
    is_static = "static" in name
    is_exact = FORMATS[name][1] is None and name != "ct nvfp4"  # whose floats are bfloat16
    assert error < (0.3 if is_static else EXACT if is_exact else 0.05)
    torch.testing.assert_close(by_single_matmuls(experts, x, weights, ids), whole)
    if "by block" in name:  # which 64 columns on each of two ranks would cut
        return
    halves = [load_stacked(name, rank, 2)[0](x, weights, ids) for rank in (0, 1)]
    error = float((halves[0] + halves[1] - whole).std() / whole.std())
    assert error < (1e-5 if FORMATS[name][1] is None else 0.3 if is_static else 0.05)


def test_experts_that_no_token_of_the_calibration_came_to_have_the_scale_of_others() -> None:
    x = torch.randn(9, CONFIG.hidden_size)
    ids, weights = torch.arange(18).view(9, 2) % CONFIG.num_experts, torch.ones(9, 2)
    expected = load_stacked("fp8 static")[0](x, weights, ids)
    assert torch.equal(load_stacked("fp8 static", unseen=[1])[0](x, weights, ids), expected)
    with pytest.raises(ModelError, match="input_scale is 0 for all experts"):
        load_stacked("fp8 static", unseen=range(CONFIG.num_experts))


def test_experts_in_activation_order_are_refused_where_they_are_stacked() -> None:
    with pytest.raises(ModelError, match="activation order are not supported"):
        load_stacked("gptq act-order")


@pytest.mark.parametrize(
    "name", ["gptq", "ct fp8", "ct nvfp4", "ct mxfp4", "ct w8a8", "bnb nf4", "bnb int8"]
)
def test_stacked_experts_can_be_made_up(name: str) -> None:
    config, _ = FORMATS[name][0]()
    quantization = choose_quantization({"quantization_config": config}, None)
    assert quantization is not None
    scheme = quantization.scheme("experts", "linear")
    assert scheme is not None
    experts = QuantizedExperts(build_for(), CONFIG, scheme, {})
    assert fill_quantized(experts, 0.02, seed=0) == 12
    for bias in (experts.gate_up_bias, experts.down_bias):
        assert bias is not None
        bias.data.zero_()
    x = torch.randn(64, CONFIG.hidden_size)
    output = experts(x, torch.ones(64, 1), torch.zeros(64, 1, dtype=torch.long))
    # Weights of deviation 0.02 through 256 and 128 columns.
    assert 1e-4 < float(output.std()) < 0.1


@pytest.mark.parametrize("stored_as", ["qweight", "weight"])
def test_experts_wait_for_the_plan_where_they_are_to_be_stacked(stored_as: str) -> None:
    build = build_for()
    model = torch.nn.Module()
    model.mlp = Experts(build, CONFIG)
    model.mlp.experts = DeferredExperts(build, CONFIG)
    quantization = choose_quantization({"quantization_config": made.gptq()[0]}, None)
    assert quantization is not None
    names = [
        f"mlp.experts.{expert}.{part}.{stored_as}"
        for expert in range(4)
        for part in ("gate_proj", "up_proj", "down_proj")
    ] + ["mlp.gate.weight"]
    assign_methods(model, quantization, DenseMethod(), StoredLayers((name, name) for name in names))
    expected = QuantizedExperts if stored_as == "qweight" else StackedExperts
    assert isinstance(model.mlp.experts, expected)
    assert isinstance(model.mlp.gate.method, DenseMethod)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("mixture")
    floats = made.make_floats(
        folder / "floats", "qwen3_moe", moe_intermediate_size=64, num_experts=4,
        num_experts_per_tok=2, num_hidden_layers=1, mlp_only_layers=[],
    )  # fmt: skip
    return made.quantize(floats, folder, *made.gptq(symmetric=False))


def test_a_mixture_of_experts_loads_from_a_quantized_checkpoint(
    mixture: tuple[Path, Path],
) -> None:
    quantized, restored = mixture
    expected = reference_logits(restored)
    assert relative_error(own_logits(quantized, cpu_backend="torch"), expected) < EXACT
    assert relative_error(own_logits(quantized), expected) < 0.1


@pytest.mark.slow
def test_two_processes_share_a_quantized_mixture_of_experts(mixture: tuple[Path, Path]) -> None:
    one, two = (own_logits(mixture[0], tensor_parallel_size=ranks) for ranks in (1, 2))
    assert relative_error(two, one) < 0.05
