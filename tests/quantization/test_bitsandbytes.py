"""bitsandbytes' 4-bit matrices: blocks that ignore rows, fused tensors, and damaged states."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import quantized_checkpoints as made
import torch
from bitsandbytes.functional import quantize_4bit
from safetensors.torch import load_file, save_file
from test_formats import EXACT, PROMPTS, own_logits, reference_logits, relative_error
from tiny_models import Reference

from penstock.layers.quantization import Shard
from penstock.layers.quantized.bitsandbytes import LlmInt8Scheme, TableScheme
from penstock.layers.quantized.native import to_blocks
from penstock.loading.bitsandbytes import BitsAndBytesCheckpoint
from penstock.ops.blocks import BlockTensor
from penstock.ops.cpu.packed import PackedMatrix
from penstock.ops.quantized import dequantize_table
from penstock.protocol.errors import ModelError

STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.make_floats(tmp_path_factory.mktemp("floats"), num_hidden_layers=1)


def write(rows: int, columns: int, nested: bool, blocksize: int = 64) -> made.Tensors:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    packed, state = quantize_4bit(
        weight, blocksize=blocksize, compress_statistics=nested, quant_type="nf4"
    )
    parts = {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    return {"weight": packed, **parts}


def flat_floats(tensors: made.Tensors) -> torch.Tensor:
    """The published layout, number by number: the first of a byte in the high bits."""
    state = json.loads(bytes(tensors[STATE].tolist()))
    scales = tensors["weight.absmax"]
    if "nested_blocksize" in state:
        whole = tensors["weight.nested_absmax"].repeat_interleave(state["nested_blocksize"])
        places = tensors["weight.nested_quant_map"][scales.int()]
        scales = places * whole[: len(places)] + state["nested_offset"]
    data = tensors["weight"].flatten()
    places = torch.stack([data >> 4, data & 15], dim=-1).flatten()
    each = scales.repeat_interleave(state["blocksize"])[: len(places)]
    return (tensors["weight.quant_map"][places.int()] * each).view(state["shape"])


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "blocksize"),
    [(8, 128, 64), (300, 128, 64), (6, 160, 64), (3, 96, 128), (5, 2, 64), (7, 50, 64)],
)
def test_blocks_may_reach_from_one_row_into_the_next(
    rows: int, columns: int, blocksize: int, nested: bool
) -> None:
    tensors = write(rows, columns, nested, blocksize)
    found = made.as_layers_take_them(tensors)
    shard = Shard((rows, columns), 0, rows, 0, columns)
    expected = TableScheme("nf4").expected(shard.shape)
    assert found["weight"].shape == expected["weight"].shape
    weight = TableScheme("nf4").convert(found, shard)
    torch.testing.assert_close(
        weight.floats(torch.arange(rows)), flat_floats(tensors), atol=0, rtol=1e-6
    )


@pytest.mark.parametrize("stored_as", [torch.bfloat16, torch.float32])
def test_bytes_may_be_stored_under_another_type(stored_as: torch.dtype) -> None:
    """bnb_4bit_quant_storage: some trainers shard floats only."""
    tensors = write(8, 128, nested=True)
    other = {**tensors, "weight": tensors["weight"].flatten().view(stored_as)[:, None]}
    own, theirs = made.as_layers_take_them(other), made.as_layers_take_them(tensors)
    assert all(torch.equal(own[name], theirs[name]) for name in theirs)


def test_tensors_of_one_matrix_may_lie_far_apart() -> None:
    one, two = ({f"{layer}.{name}": t for name, t in write(4, 128, True).items()} for layer in "ab")
    apart = dict(
        sorted({**one, **two, "norm.weight": torch.ones(3)}.items(), key=lambda i: i[0][2:])
    )
    checkpoint = BitsAndBytesCheckpoint(made.InMemory(apart))
    names = [name for name, _ in checkpoint.tensors()]
    assert sorted(names) == sorted(checkpoint.names())
    assert set(names) == {
        "norm.weight",
        *(f"{layer}.{part}" for layer in "ab" for part in ("weight", "weight_scale", "quant_map")),
    }


def changed(key: str, value: object) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        raw = {**json.loads(bytes(tensor.tolist())), key: value}
        return torch.tensor(list(json.dumps(raw).encode()), dtype=torch.uint8)

    return change


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        (STATE, lambda t: t[:-1], "a.weight.quant_state is not JSON"),
        (STATE, lambda t: torch.tensor([0x5B, 0x5D]).byte(), "must be an object, got"),
        (STATE, lambda t: t.float(), "stored as float32; supported: uint8"),
        (STATE, changed("shape", [1024]), r"has shape \[1024\]; supported: matrices"),
        (STATE, changed("shape", [4, -128]), r"has shape \[4, -128\]"),
        (STATE, changed("shape", [16, 64, 1]), "supported: matrices"),
        (STATE, changed("shape", [4, 128]), "two numbers in each do not make the 4 x 128"),
        (STATE, changed("blocksize", 0), "blocksize must be from 1 to 2.31 - 1, got 0"),
        (STATE, changed("blocksize", "64"), "blocksize must be from 1 to 2.31 - 1, got '64'"),
        (STATE, changed("blocksize", 32), "absmax has 16 numbers, but the layer needs 32"),
        (STATE, changed("blocksize", 2**70), "blocksize must be from 1 to 2.31 - 1, got 1180"),
        (STATE, changed("nested_offset", None), "nested_offset must be a number, got None"),
        (STATE, changed("nested_offset", 10**400), "nested_offset must be a number, got 1000"),
        (STATE, changed("nested_blocksize", 4), "nested_absmax has 1 numbers, but .* needs 4"),
        ("weight", lambda t: t[:-1], "a.weight has 511 bytes"),
        ("weight.absmax", lambda t: t.float(), "absmax is stored as float32"),
        ("weight.absmax", lambda t: t[:3], "absmax has 3 numbers, but the layer needs 16"),
        ("weight.quant_map", lambda t: t[:8], "quant_map has 8 numbers, but the layer needs 16"),
        ("weight.nested_quant_map", lambda t: t[:9], "nested_quant_map has 9 numbers"),
    ],
)
def test_what_does_not_fit_together_is_named(
    part: str, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    tensors = write(8, 128, nested=True)
    with pytest.raises(ModelError, match=message):
        made.as_layers_take_them({**tensors, part: change(tensors[part])})


def test_a_block_larger_than_all_there_is_costs_no_memory() -> None:
    tensors = write(8, 128, nested=True)
    vast = {**tensors, STATE: changed("nested_blocksize", 2**31 - 1)(tensors[STATE])}
    found, usual = (made.as_layers_take_them(each)["weight_scale"] for each in (vast, tensors))
    assert torch.equal(found, usual)


@pytest.mark.parametrize("part", ["weight", "weight.absmax", "weight.nested_absmax"])
def test_what_is_missing_is_named(part: str) -> None:
    tensors = write(8, 128, nested=True)
    del tensors[part]
    with pytest.raises(ModelError, match=f"the checkpoint lacks a.{part},"):
        made.as_layers_take_them(tensors)


def test_fused_tensors_of_a_checkpoint_are_taken_apart(tmp_path: Path) -> None:
    folder = made.make_floats(
        tmp_path / "phi3", "phi3", num_hidden_layers=1, sliding_window=None, head_dim=32
    )
    quantized, restored = made.quantize(folder, tmp_path, *made.bitsandbytes(nested=True))
    own = own_logits(quantized, cpu_backend="torch")
    assert relative_error(own, reference_logits(restored)) < EXACT


def test_transformers_reads_the_same_from_the_checkpoint_itself(
    floats: Path, tmp_path: Path
) -> None:
    quantized, _ = made.quantize(floats, tmp_path, *made.bitsandbytes(nested=True))
    reference = Reference(quantized)
    # bitsandbytes multiplies in 16 bits, and rounds as the processor's instructions do.
    reference.model = reference.model.dequantize().float()
    rows = [reference.logits(prompt)[-1].log_softmax(-1) for prompt in PROMPTS]
    own = own_logits(quantized, cpu_backend="torch")
    assert relative_error(own, torch.stack(rows)) < EXACT


def test_layers_that_were_left_out_are_floats(floats: Path, tmp_path: Path) -> None:
    """As in checkpoints that keep the layers which suffer most."""
    config, writer = made.bitsandbytes()
    config["llm_int8_skip_modules"] = ["lm_head", "model.layers.0.mlp"]
    quantized, restored = made.quantize(
        floats, tmp_path, config, writer, lambda layer: "self_attn" in layer
    )
    own = own_logits(quantized, cpu_backend="torch")
    assert relative_error(own, reference_logits(restored)) < EXACT


def test_the_output_projection_may_be_quantized_too(floats: Path, tmp_path: Path) -> None:
    quantized, restored = made.quantize(
        floats, tmp_path, *made.bitsandbytes(), lambda layer: "embed" not in layer
    )
    own = own_logits(quantized, cpu_backend="torch")
    assert relative_error(own, reference_logits(restored)) < EXACT


def test_a_state_that_is_missing_is_said(floats: Path, tmp_path: Path) -> None:
    quantized, _ = made.quantize(floats, tmp_path, *made.bitsandbytes())
    path = quantized / "model.safetensors"
    kept = {name: t for name, t in load_file(path).items() if "o_proj.weight.quant" not in name}
    save_file(kept, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"o_proj.weight has shape \[8192, 1\]"):
        own_logits(quantized)


def test_weights_in_an_order_for_one_kind_of_gpu_are_refused() -> None:
    tensors = {
        "weight": torch.zeros(4, 8, dtype=torch.int8),
        "SCB": torch.ones(4),
        "weight_format": torch.tensor(2, dtype=torch.uint8),
    }
    with pytest.raises(ModelError, match="weight_format is 2"):
        LlmInt8Scheme().convert(tensors, Shard((4, 8), 0, 4, 0, 8))


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_the_librarys_integers_are_near_the_table(kind: str) -> None:
    _, writer = made.bitsandbytes(kind, nested=True)
    tensors, meant = writer(torch.randn(48, 192) * torch.logspace(-6, 2, 48)[:, None])
    found = made.as_layers_take_them(tensors)
    weight = TableScheme(kind).convert(found, Shard((48, 192), 0, 48, 0, 192))
    blocks = to_blocks(weight)
    assert blocks is not None
    assert isinstance(blocks.blocks, BlockTensor)
    floats = PackedMatrix(blocks.blocks).embed(torch.arange(48))
    if blocks.row_factor is not None:
        floats *= blocks.row_factor[:, None]
    largest = meant.view(48, 3, 64).abs().amax(-1).repeat_interleave(64, dim=1)
    assert ((floats - meant).abs() <= largest * (1 / 254 + 2**-10)).all()


def test_rows_of_a_table_are_its_numbers_times_their_scales() -> None:
    values = torch.arange(16.0) - 8
    packed = torch.tensor([[0x10, 0xF8]], dtype=torch.uint8)
    floats = dequantize_table(packed, torch.tensor([[2.0, 10.0]]), values)
    assert floats.tolist() == [[-16.0, -14.0, 0.0, 70.0]]
