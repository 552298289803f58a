"""Blocks that become blocks of another type stand for the same numbers, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf_builder import random_blocks

from penstock.loading.gguf.file import GGML_TYPES
from penstock.ops import gguf_recode
from penstock.ops.blocks import BlockTensor
from penstock.ops.cpu.dtypes import NATIVE_TYPES
from penstock.ops.gguf_blocks import dequantize
from penstock.ops.gguf_recode import RECODINGS, TARGET_BYTES, TARGET_SIZE, recode

TYPES = {ggml_type.name: ggml_type for ggml_type in GGML_TYPES.values()}


def matrix(type_name: str, rows: int = 7, columns: int = 512) -> BlockTensor:
    data = random_blocks(np.random.default_rng(3), type_name, rows, columns)
    return BlockTensor(*TYPES[type_name], torch.from_numpy(data))


@pytest.mark.parametrize("type_name", RECODINGS)
def test_nothing_is_rounded(type_name: str) -> None:
    weight = matrix(type_name)
    recoded = recode(weight, NATIVE_TYPES)
    assert recoded is not None
    assert recoded.type_name in NATIVE_TYPES
    assert recoded.shape == weight.shape == (7, 512)
    assert torch.equal(dequantize(recoded), dequantize(weight))


@pytest.mark.parametrize("type_name", RECODINGS)
def test_chunks_leave_no_seam(type_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = matrix(type_name, rows=11, columns=768)
    whole = recode(weight, NATIVE_TYPES)
    monkeypatch.setattr(gguf_recode, "CHUNK_ELEMENTS", 512)
    parts = recode(weight, NATIVE_TYPES)
    assert whole is not None
    assert parts is not None
    assert torch.equal(parts.data, whole.data)


@pytest.mark.parametrize("target", TARGET_BYTES)
def test_targets_are_the_types_that_the_file_format_has(target: str) -> None:
    assert TYPES[target] == (target, TARGET_SIZE, TARGET_BYTES[target])


def test_every_exponent_that_a_half_has_is_kept_and_others_are_refused() -> None:
    weight = matrix("MXFP4", rows=1, columns=32 * 40)
    blocks = weight.data.view(-1, 17)
    blocks[:, 0] = torch.arange(104, 144, dtype=torch.uint8)  # 2**-24 to 2**15
    recoded = recode(weight, NATIVE_TYPES)
    assert recoded is not None
    assert torch.equal(dequantize(recoded), dequantize(weight))
    for exponent in (103, 144, 0, 255):
        blocks[0, 0] = exponent
        assert recode(weight, NATIVE_TYPES) is None


def test_other_types_and_targets_that_nobody_takes_are_left_alone() -> None:
    assert recode(matrix("Q2_K"), NATIVE_TYPES) is None
    assert recode(matrix("MXFP4"), ("Q4_K", "F32")) is None
