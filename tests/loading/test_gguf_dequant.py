from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_builder import (
    GRID_TYPES,
    K_TYPES,
    OTHER_TYPES,
    QUANTIZABLE,
    random_blocks,
    reference_floats,
)

from penstock.loading.gguf.dequant import SUPPORTED_TYPES, check_supported, dequantize
from penstock.loading.gguf.file import GGML_TYPES, GGUFTensor
from penstock.ops import gguf_blocks, gguf_grids
from penstock.protocol.errors import ModelError

TYPES = {ggml_type.name: ggml_type for ggml_type in GGML_TYPES.values()}


def described(type_name: str, data: np.ndarray, columns: int) -> GGUFTensor:
    return GGUFTensor("some.weight", TYPES[type_name], (len(data), columns), 0, data.nbytes)


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return np.array_equal(left.view(np.uint32), right.view(np.uint32))


@pytest.mark.parametrize("rows", [1, 3, 7, 129])
@pytest.mark.parametrize("columns", [256, 1280])
@pytest.mark.parametrize("type_name", SUPPORTED_TYPES)
def test_random_blocks_become_the_reference_floats_bit_for_bit(
    type_name: str, rows: int, columns: int
) -> None:
    data = random_blocks(np.random.default_rng(rows), type_name, rows, columns)
    expected = reference_floats(data, type_name)
    result = dequantize(described(type_name, data, columns), data.reshape(-1))
    assert result.shape == (rows, columns)
    assert same_bits(result.numpy(), expected.reshape(rows, columns))


@pytest.mark.parametrize("type_name", [name for name in QUANTIZABLE if name.startswith("Q")])
def test_quantized_weights_come_back_close_to_what_they_were(type_name: str) -> None:
    weights = np.random.default_rng(0).standard_normal((5, 320), dtype=np.float32)
    data = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[type_name])
    result = dequantize(described(type_name, data, 320), data.reshape(-1)).numpy()
    assert np.abs(result - weights).max() < 0.5
    assert np.corrcoef(result.reshape(-1), weights.reshape(-1))[0, 1] > 0.99


@pytest.mark.parametrize("type_name", ["Q4_1", "Q6_K", "F16"])
def test_chunks_leave_no_seam(type_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_blocks(np.random.default_rng(1), type_name, 11, 768)
    tensor = described(type_name, data, 768)
    whole = dequantize(tensor, data.reshape(-1))
    monkeypatch.setattr(gguf_blocks, "CHUNK_ELEMENTS", 512)
    assert torch.equal(dequantize(tensor, data.reshape(-1)), whole)


def test_out_is_filled_and_returned() -> None:
    data = random_blocks(np.random.default_rng(2), "Q8_0", 4, 64)
    tensor = described("Q8_0", data, 64)
    out = torch.full((4, 64), torch.nan)
    assert dequantize(tensor, torch.from_numpy(data).view(-1), out) is out
    assert torch.equal(out, dequantize(tensor, data.reshape(-1)))


def test_every_type_that_must_be_supported_is() -> None:
    assert set(SUPPORTED_TYPES) == {*QUANTIZABLE, *K_TYPES, *OTHER_TYPES, *GRID_TYPES}


def test_an_unsupported_type_is_named_with_the_tensor_and_what_is_supported() -> None:
    tensor = GGUFTensor("blk.0.attn_q.weight", TYPES["Q8_1"], (1, 32), 0, 36)
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.weight.*Q8_1.*Q4_K, Q5_K, Q6_K"):
        dequantize(tensor, np.zeros(36, np.uint8))


@pytest.mark.parametrize("type_name", GRID_TYPES)
def test_without_the_tables_of_a_type_the_error_says_what_to_install(
    type_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = GGUFTensor("blk.0.attn_q.weight", TYPES[type_name], (1, 256), 0, 0)
    monkeypatch.setitem(sys.modules, "gguf", None)
    gguf_grids.table.cache_clear()
    with pytest.raises(ModelError, match=rf"attn_q\.weight.*{type_name}.*pip install.*gguf"):
        check_supported(tensor, tmp_path)
    check_supported(tensor._replace(type=TYPES["Q4_K"]))  # which needs none


def test_the_gguf_package_is_imported_only_for_types_that_need_its_tables() -> None:
    code = (
        "import sys; from penstock.loading.gguf.dequant import check_supported; "
        "from penstock.loading.gguf.file import GGML_TYPES, GGUFTensor; "
        "check_supported(GGUFTensor('a', GGML_TYPES[12], (1, 256), 0, 144)); "
        "assert 'gguf' not in sys.modules; "
        "check_supported(GGUFTensor('a', GGML_TYPES[16], (1, 256), 0, 66)); "
        "assert 'gguf' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
