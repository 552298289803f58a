"""Quantized checkpoints with wrong tensors: each is refused by name, and none is read wrongly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quantized_checkpoints as made
import torch
from safetensors.torch import load_file, save_file
from test_formats import EXACT, FP4, INT4, own_logits, reference_logits, relative_error

from penstock.layers.quantization import Shard
from penstock.layers.quantized.checkpoints import choose_quantization
from penstock.layers.quantized.packed import PackedScheme
from penstock.layers.quantized.schemes import Fp4Scheme
from penstock.layers.quantized.weights import W4Weight
from penstock.protocol.errors import ModelError

DOWN = "model.layers.0.mlp.down_proj"
ORDERED = made.gptq(symmetric=False, act_order=True)
PACKED = made.compressed("pack-quantized", INT4)
MXFP4 = made.compressed(
    "mxfp4-pack-quantized",
    {**FP4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
)
NVFP4 = made.compressed(
    "nvfp4-pack-quantized",
    {
        **FP4, "strategy": "tensor_group", "group_size": 16,
        "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn",
    },
)  # fmt: skip
NAN, INF = float("nan"), float("inf")
Change = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.make_floats(tmp_path_factory.mktemp("floats"), num_hidden_layers=1)


def with_first(value: float) -> Change:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed.view(-1)[0] = value
        return changed

    return change


def damage(folder: Path, parameter: str, change: Change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = f"{DOWN}.{parameter}"
    save_file({**tensors, name: change(tensors[name]).contiguous()}, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("written", "parameter", "change", "message"),
    [
        (ORDERED, "g_idx", with_first(-1), "g_idx names groups from -1 to 7, but the matrix has 8"),
        (ORDERED, "g_idx", with_first(8), "g_idx names groups from 0 to 8, but the matrix has 8"),
        (ORDERED, "g_idx", with_first(2**31 - 1), "g_idx names groups from 0 to 2147483647"),
        (ORDERED, "qweight", torch.Tensor.float, "qweight is stored as float32"),
        (ORDERED, "scales", torch.Tensor.byte, "scales is stored as uint8; supported: floats"),
        (made.fp8("tensor"), "weight_scale", torch.Tensor.int, "weight_scale is stored as int32"),
        (made.bitsandbytes_int8(), "SCB", torch.Tensor.long, "SCB is stored as int64"),
        (made.awq(), "qweight", torch.Tensor.long, "qweight is stored as int64"),
        (made.awq(), "qzeros", torch.Tensor.short, "qzeros is stored as int16"),
        (PACKED, "weight_packed", torch.Tensor.long, "weight_packed is stored as int64"),
        (PACKED, "weight_packed", torch.Tensor.char, "weight_packed is stored as int8"),
        (PACKED, "weight_packed", lambda tensor: tensor[:, :-1], "has shape"),
        (MXFP4, "weight_scale", torch.Tensor.half, "weight_scale is stored as float16"),
        (MXFP4, "weight_packed", torch.Tensor.int, "weight_packed is stored as int32"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    written: Any, parameter: str, change: Change, message: str, floats: Path, tmp_path: Path
) -> None:
    """A word twice as wide would be a row twice as long, past the end of what it multiplies."""
    quantized, _ = made.quantize(floats, tmp_path, *written)
    damage(quantized, parameter, change)
    with pytest.raises(ModelError, match=rf"tensor {DOWN}\.\w+[: ].*{message}"):
        own_logits(quantized)


@pytest.mark.parametrize(
    ("written", "parameter", "value", "message"),
    [
        (ORDERED, "scales", NAN, "scales has scales that are not finite"),
        (made.awq(), "scales", INF, "scales has scales that are not finite"),
        (PACKED, "weight_scale", NAN, "weight_scale has scales that are not finite"),
        (MXFP4, "weight_scale", 255, "weight_scale has scales that are not finite"),
        (NVFP4, "weight_scale", NAN, "weight_scale has scales that are not finite"),
        (NVFP4, "weight_global_scale", 0.0, "weight_global_scale must be a positive scale, is 0.0"),
        (made.fp8("block"), "weight_scale_inv", INF, "weight_scale_inv has scales that are not fi"),
        (made.fp8("tensor", static=True), "input_scale", 0.0, "input_scale must be a positive sca"),
        (made.fp8("tensor", static=True), "input_scale", NAN, "input_scale has scales that are no"),
        (made.bitsandbytes_int8(), "SCB", NAN, "SCB has scales that are not finite"),
        (made.bitsandbytes(), "weight.absmax", INF, "weight_scale has scales that are not finite"),
        (made.bitsandbytes(), "weight.quant_map", NAN, "quant_map has scales that are not finite"),
    ],
)
def test_scales_that_nothing_can_be_computed_with_are_named(
    written: Any, parameter: str, value: float, message: str, floats: Path, tmp_path: Path
) -> None:
    """Else the model would load, and each request fail without a word about the checkpoint."""
    quantized, _ = made.quantize(floats, tmp_path, *written)
    damage(quantized, parameter, with_first(value))
    with pytest.raises(ModelError, match=rf"tensor {DOWN}\.\w+: {message}"):
        own_logits(quantized)


def test_scales_of_activations_that_nobody_reads_may_be_anything(
    floats: Path, tmp_path: Path
) -> None:
    """Tools leave them unset where activations are dynamic."""
    config, write = made.fp8("tensor", static=True)
    changed = {**config, "activation_scheme": "dynamic"}
    quantized, _ = made.quantize(floats, tmp_path, changed, write)
    damage(quantized, "input_scale", with_first(NAN))
    assert bool(torch.isfinite(own_logits(quantized)).all())


def test_columns_in_an_order_that_the_configuration_does_not_know_of_are_refused(
    floats: Path, tmp_path: Path
) -> None:
    """Their scales would be other columns'."""
    config, write = ORDERED
    quantized, _ = made.quantize(floats, tmp_path, {**config, "desc_act": False}, write)
    with pytest.raises(ModelError, match="set desc_act to true"):
        own_logits(quantized)


def test_the_same_in_the_other_format(floats: Path, tmp_path: Path) -> None:
    config, write = PACKED

    def write_shuffled(weight: torch.Tensor) -> tuple[made.Tensors, torch.Tensor]:
        tensors, meant = write(weight)
        groups = torch.arange(weight.shape[1]).flip(0) // 32
        return {**tensors, "weight_g_idx": groups.int()}, meant

    quantized, _ = made.quantize(floats, tmp_path, config, write_shuffled)
    with pytest.raises(ModelError, match='actorder does not say so: set it to "group"'):
        own_logits(quantized)


def test_an_order_that_is_missing_is_named(floats: Path, tmp_path: Path) -> None:
    quantized, _ = made.quantize(floats, tmp_path, *ORDERED)
    path = quantized / "model.safetensors"
    kept = {name: t for name, t in load_file(path).items() if not name.endswith("o_proj.g_idx")}
    save_file(kept, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks .*o_proj\.g_idx"):
        own_logits(quantized)


@pytest.mark.parametrize("act_order", [False, True])
def test_an_order_of_zeros_is_none(act_order: bool, floats: Path, tmp_path: Path) -> None:
    config, write = made.gptq(symmetric=False)

    def write_unset(weight: torch.Tensor) -> tuple[made.Tensors, torch.Tensor]:
        tensors, meant = write(weight)
        return {**tensors, "g_idx": torch.zeros_like(tensors["g_idx"])}, meant

    changed = {**config, "desc_act": act_order}
    quantized, restored = made.quantize(floats, tmp_path, changed, write_unset)
    own = own_logits(quantized, cpu_backend="torch")
    assert relative_error(own, reference_logits(restored)) < EXACT


def test_columns_whose_groups_were_never_set_are_in_order(floats: Path, tmp_path: Path) -> None:
    config, write = made.compressed("pack-quantized", INT4)
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"

    def write_unset(weight: torch.Tensor) -> tuple[made.Tensors, torch.Tensor]:
        tensors, meant = write(weight)
        unset = torch.full((weight.shape[1],), -1, dtype=torch.int32)
        return {**tensors, "weight_g_idx": unset}, meant

    quantized, restored = made.quantize(floats, tmp_path, config, write_unset)
    own = own_logits(quantized, cpu_backend="torch")
    assert relative_error(own, reference_logits(restored)) < EXACT


def test_a_shard_of_columns_in_order_keeps_the_scales_of_its_own_groups() -> None:
    scheme = PackedScheme(4, 32, act_order=True)
    whole = {
        "weight_packed": torch.full((8, 16), 0x11111111, dtype=torch.int32),
        "weight_scale": torch.arange(32.0).view(8, 4),
        "weight_g_idx": torch.full((128,), -1, dtype=torch.int32),
    }
    shard = Shard((8, 128), 0, 8, 64, 64)
    expected = scheme.expected(shard.shape)
    own = {name: shard.cut_packed(name, tensor, expected[name]) for name, tensor in whole.items()}
    weight = scheme.convert(own, shard)
    assert isinstance(weight, W4Weight)
    assert torch.equal(weight.scales, whole["weight_scale"][:, 2:])


def test_groups_must_divide_fp4_rows() -> None:
    with pytest.raises(ModelError, match="8 x 40 cannot have nvfp4 weights: groups of 16"):
        Fp4Scheme("nvfp4").expected((8, 40))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq", "bits": 4.0}, "bits must be a whole number, got 4.0"),
    ],
)
def test_what_python_cannot_compute_with_is_said(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        choose_quantization({"quantization_config": config}, None)
